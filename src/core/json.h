// JSON as the configuration tree, so that one reader serves both.
#pragma once

#include "core/config.h"

namespace headloom {

// The file's object; null becomes an empty list. Throws Error naming the file.
Node read_json(const std::string& path);
std::string to_json(const Node& node);

}  // namespace headloom
