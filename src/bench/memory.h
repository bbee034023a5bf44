// Memory that tensors take, counted where it is allocated.
#pragma once

#include <functional>

namespace headloom::bench {

// Peak bytes of tensors that `f` allocates above what is held when it begins.
double peak_bytes(const std::function<void()>& f);

}  // namespace headloom::bench
