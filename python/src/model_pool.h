// The pool of whole models, by the text of their [model] table: what every operator on models
// shares.
#pragma once

#include "functional_call.h"

namespace headloom::python {

Pool& model_pool();

}  // namespace headloom::python
