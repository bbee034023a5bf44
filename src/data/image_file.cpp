#include "data/image_file.h"

#include <png.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <csetjmp>
#include <cstdio>
#include <string_view>

#include <jpeglib.h>  // after cstdio: it needs FILE

#include "core/error.h"
#include "core/files.h"

namespace headloom::data {
namespace {

// Keeps a few broken bytes from asking for all memory.
constexpr uint64_t kMaxPixels = uint64_t{1} << 26;

[[noreturn]] void broken(const std::string& path, const char* kind, const std::string& reason) {
  fail("the image '", path, "' is a broken ", kind, " file: ", reason, ".");
}

Image allocate(const std::string& path, const char* kind, uint64_t height, uint64_t width) {
  if (height < 1 || width < 1 || height > kMaxPixels || width > kMaxPixels / height) {
    broken(path, kind, str("its size is ", width, " x ", height, " pixels"));
  }
  Image image{static_cast<int64_t>(height), static_cast<int64_t>(width), {}};
  image.rgb.resize(height * width * 3);
  return image;
}

Image read_png(const std::string& path, const std::string& bytes) {
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  if (!png_image_begin_read_from_memory(&png, bytes.data(), bytes.size())) {
    broken(path, "PNG", png.message);
  }
  png.format = PNG_FORMAT_RGB;
  // 16-bit values of a file that does not say its gamma are sRGB, as those of 8 bits are.
  png.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
  Image image;
  try {
    image = allocate(path, "PNG", png.height, png.width);
  } catch (...) {
    png_image_free(&png);
    throw;
  }
  const png_color white{255, 255, 255};
  if (!png_image_finish_read(&png, &white, image.rgb.data(), 0, nullptr)) {
    broken(path, "PNG", png.message);
  }
  return image;
}

// libjpeg reports errors through a function that must not return: it jumps back into begin() or
// read(), which therefore have no objects to destroy.
class Jpeg {
 public:
  Jpeg() {
    jpeg_.err = jpeg_std_error(&errors_);
    jpeg_.client_data = this;
    errors_.error_exit = leave;
    // Warnings (level -1) are about data that is missing or wrong: a file cut short, say.
    errors_.emit_message = [](j_common_ptr jpeg, int level) {
      if (level < 0) leave(jpeg);
    };
  }
  ~Jpeg() { jpeg_destroy_decompress(&jpeg_); }
  Jpeg(const Jpeg&) = delete;
  Jpeg& operator=(const Jpeg&) = delete;

  // False where it failed; message() says why.
  bool begin(const std::string& bytes) {
    if (setjmp(place_)) return false;
    jpeg_create_decompress(&jpeg_);
    jpeg_mem_src(&jpeg_, reinterpret_cast<const unsigned char*>(bytes.data()),
                 static_cast<unsigned long>(bytes.size()));
    jpeg_read_header(&jpeg_, TRUE);
    // Photographs for print; libjpeg has no RGB of them.
    jpeg_.out_color_space = has_ink() ? JCS_CMYK : JCS_RGB;
    return true;
  }
  // `row` has room for all pixels, `inks` for a row of four bytes a pixel where has_ink().
  bool read(uint8_t* row, uint8_t* inks) {
    if (setjmp(place_)) return false;
    jpeg_start_decompress(&jpeg_);
    while (jpeg_.output_scanline < jpeg_.output_height) {
      uint8_t* const to = row + static_cast<size_t>(jpeg_.output_scanline) * width() * 3;
      JSAMPROW rows[] = {has_ink() ? inks : to};
      jpeg_read_scanlines(&jpeg_, rows, 1);
      if (has_ink()) to_rgb(inks, to);
    }
    jpeg_finish_decompress(&jpeg_);
    return true;
  }
  bool has_ink() const {
    return jpeg_.jpeg_color_space == JCS_CMYK || jpeg_.jpeg_color_space == JCS_YCCK;
  }
  size_t height() const { return jpeg_.image_height; }
  size_t width() const { return jpeg_.image_width; }
  const char* message() const { return message_; }

 private:
  // Each ink lets through a part of its colour, and black of all. Adobe's files, which are nearly
  // all that there are, hold what is let through; others hold what is not.
  void to_rgb(const uint8_t* inks, uint8_t* rgb) const {
    const auto through = [&](uint8_t ink) {
      return jpeg_.saw_Adobe_marker ? unsigned{ink} : 255u - ink;
    };
    for (size_t i = 0; i < width(); ++i) {
      for (size_t c = 0; c < 3; ++c) {
        rgb[3 * i + c] =
            static_cast<uint8_t>((through(inks[4 * i + c]) * through(inks[4 * i + 3]) + 127) / 255);
      }
    }
  }

  [[noreturn]] static void leave(j_common_ptr jpeg) {
    auto* self = static_cast<Jpeg*>(jpeg->client_data);
    jpeg->err->format_message(jpeg, self->message_);
    std::longjmp(self->place_, 1);
  }

  jpeg_decompress_struct jpeg_{};
  jpeg_error_mgr errors_{};
  std::jmp_buf place_;
  char message_[JMSG_LENGTH_MAX] = "";
};

Image read_jpeg(const std::string& path, const std::string& bytes) {
  Jpeg jpeg;
  if (!jpeg.begin(bytes)) broken(path, "JPEG", jpeg.message());
  Image image = allocate(path, "JPEG", jpeg.height(), jpeg.width());
  std::vector<uint8_t> inks(jpeg.has_ink() ? 4 * jpeg.width() : 0);
  if (!jpeg.read(image.rgb.data(), inks.data())) broken(path, "JPEG", jpeg.message());
  return image;
}

// "P6 width height maximum" (P5: grey), spaces and comments between, one space, then the pixels, of
// two bytes each where the maximum is above 255.
Image read_netpbm(const std::string& path, const std::string& bytes) {
  size_t at = 2;
  const auto number = [&]() -> uint64_t {
    while (at < bytes.size() &&
           (std::isspace(static_cast<unsigned char>(bytes[at])) || bytes[at] == '#')) {
      at = bytes[at] == '#' ? std::min(bytes.find('\n', at), bytes.size()) : at + 1;
    }
    uint64_t value = 0;
    const auto [end, error] =
        std::from_chars(bytes.data() + at, bytes.data() + bytes.size(), value);
    if (error != std::errc()) broken(path, "PPM", "its header has no width, height and maximum");
    at = static_cast<size_t>(end - bytes.data());
    return value;
  };
  const uint64_t width = number(), height = number(), maximum = number();
  if (maximum < 1 || maximum > 65535) {
    broken(path, "PPM", str("its maximum is ", maximum, ", expected 1 to 65535"));
  }
  ++at;
  Image image = allocate(path, "PPM", height, width);
  const size_t channels = bytes[1] == '6' ? 3 : 1, wide = maximum > 255 ? 2 : 1;
  const size_t size = image.rgb.size() / 3 * channels * wide;
  if (at > bytes.size() || bytes.size() - at < size) {
    broken(path, "PPM", str("it ends after ", bytes.size(), " of ", at + size, " bytes"));
  }
  for (size_t i = 0; i < image.rgb.size(); ++i) {
    const size_t place = at + (channels == 3 ? i : i / 3) * wide;
    uint64_t value = static_cast<uint8_t>(bytes[place]);
    if (wide == 2) value = value << 8 | static_cast<uint8_t>(bytes[place + 1]);
    image.rgb[i] = static_cast<uint8_t>((std::min(value, maximum) * 255 + maximum / 2) / maximum);
  }
  return image;
}

}  // namespace

const std::vector<std::string>& image_extensions() {
  static const std::vector<std::string> endings = {".png", ".jpg", ".jpeg", ".ppm", ".pgm"};
  return endings;
}

Image read_image(const std::string& path) {
  const std::string bytes = read_file(path);
  const std::string_view content(bytes);
  if (content.starts_with("\x89PNG")) return read_png(path, bytes);
  if (content.starts_with("\xff\xd8")) return read_jpeg(path, bytes);
  if (content.starts_with("P5") || content.starts_with("P6")) return read_netpbm(path, bytes);
  fail("'", path, "' is no image: it is ",
       bytes.empty() ? "empty" : "neither PNG, JPEG nor binary PPM or PGM", ".");
}

}  // namespace headloom::data
