// Files that torch.save wrote (PyTorch 1.6 and newer): a zip archive of a pickle and the tensors'
// numbers.
#pragma once

#include <string>

#include "storage/safetensors.h"

namespace headloom {

// Maps the file and returns tensors that share the mapping (copy on write). Nothing of the pickle
// is executed. Throws Error naming the file and what is damaged in it, compressed, or neither a
// tensor nor a plain value.
NamedTensors read_torch_file(const std::string& path);

}  // namespace headloom
