// Pictures in files: PNG (libpng), JPEG (libjpeg) and binary PPM or PGM.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headloom::data {

struct Image {
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> rgb;  // height * width * 3, row by row
};

// The endings that read_image knows: ".png", ".jpg", ...
const std::vector<std::string>& image_extensions();

// Transparent parts are white, grey becomes RGB. The format is told by the content, not by the
// name. Throws Error naming the file for one that cannot be read, is none of these, is broken or
// ends early.
Image read_image(const std::string& path);

}  // namespace headloom::data
