// PyTorch's library contains gloo, but its wheel does not ship gloo's headers. What its own header
// ProcessGroupGloo.hpp takes from them is declared in this folder: names of classes that it holds
// by pointer. Nothing of gloo is defined here. cmake/Gloo.cmake checks that they suffice.
#pragma once

namespace gloo {
class Algorithm;
}
