#include "data/image_set.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <unordered_set>

#include "core/error.h"
#include "core/files.h"
#include "core/text.h"
#include "data/corpus.h"
#include "data/image_file.h"
#include "data/labelled.h"
#include "data/random.h"

namespace headloom::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kCifarSize = 32;
constexpr int64_t kCifarPixels = 3 * kCifarSize * kCifarSize;

// Of an image that is scaled, in pixels: a narrow one would need memory without end.
constexpr int64_t kLongestSide = 1 << 16;

// Channel statistics of the training images, as commonly used.
constexpr std::array<double, 3> kCifar10Mean = {0.4914, 0.4822, 0.4465};
constexpr std::array<double, 3> kCifar10Spread = {0.2470, 0.2435, 0.2616};
constexpr std::array<double, 3> kCifar100Mean = {0.5071, 0.4865, 0.4409};
constexpr std::array<double, 3> kCifar100Spread = {0.2673, 0.2564, 0.2762};
constexpr std::array<double, 3> kImageNetMean = {0.485, 0.456, 0.406};
constexpr std::array<double, 3> kImageNetSpread = {0.229, 0.224, 0.225};

// [N, 3, h, w] bytes -> [N, 3, size, size]; `path` is for the message.
at::Tensor fit(const at::Tensor& pixels, const ImageFileOptions& options, const std::string& path) {
  const int64_t height = pixels.size(2), width = pixels.size(3), size = options.size;
  if (height == size && width == size) return pixels;
  require(options.resize, "the image '", path, "' is ", width, " x ", height, " pixels, expected ",
          size, " x ", size, " (or set resize = true).");
  const double scale = static_cast<double>(size) / static_cast<double>(std::min(height, width));
  const auto scaled = [&](int64_t side) {
    return std::max(size, static_cast<int64_t>(std::llround(static_cast<double>(side) * scale)));
  };
  const int64_t rows = scaled(height), columns = scaled(width);
  require(rows <= kLongestSide && columns <= kLongestSide, "the image '", path, "' is ", width,
          " x ", height, " pixels, which is too narrow to be scaled to ", size,
          " pixels on its shorter side.");
  const at::Tensor resized =
      at::_upsample_bilinear2d_aa(pixels.to(at::kFloat), {rows, columns}, /*align_corners=*/false);
  return resized.narrow(2, (rows - size) / 2, size)
      .narrow(3, (columns - size) / 2, size)
      .round()
      .clamp(0, 255)
      .to(at::kByte);
}

// Collects images of one size.
class Builder {
 public:
  void add(const at::Tensor& pixels, int64_t label) {  // [N, 3, size, size]
    pieces_.push_back(pixels.contiguous());
    for (int64_t i = 0; i < pixels.size(0); ++i) labels_.push_back(label);
  }
  void add(const at::Tensor& pixels, const std::vector<int64_t>& labels) {
    pieces_.push_back(pixels.contiguous());
    labels_.insert(labels_.end(), labels.begin(), labels.end());
  }
  bool empty() const { return labels_.empty(); }
  ImageSet take() const {
    return {pieces_.empty() ? at::empty({0}, at::kByte) : at::cat(pieces_), labels_};
  }

 private:
  std::vector<at::Tensor> pieces_;
  std::vector<int64_t> labels_;
};

std::vector<fs::path> entries(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> paths;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    paths.push_back(entry->path());
  }
  if (error) fail("cannot list the folder '", folder, "': ", error.message(), ".");
  std::sort(paths.begin(), paths.end());
  return paths;
}

void add_cifar(const std::string& path, bool fine, const ImageFileOptions& options, Builder& to) {
  const std::string bytes = read_file(path);
  const int64_t head = fine ? 2 : 1, classes = fine ? 100 : 10;
  const int64_t record = head + kCifarPixels, size = static_cast<int64_t>(bytes.size());
  require(size > 0 && size % record == 0, "'", path, "' is no CIFAR-", classes, " file: it has ",
          size, " bytes, expected a multiple of ", record, ".");
  const at::Tensor records =
      at::from_blob(const_cast<char*>(bytes.data()), {size / record, record}, at::kByte);
  const at::Tensor label = records.select(1, head - 1).to(at::kLong).contiguous();
  const std::vector<int64_t> labels(label.data_ptr<int64_t>(),
                                    label.data_ptr<int64_t>() + label.numel());
  for (size_t i = 0; i < labels.size(); ++i) {
    require(labels[i] < classes, "'", path, "' is a broken CIFAR-", classes, " file: its record ",
            i, " has the label ", labels[i], ", expected one below ", classes, ".");
  }
  const at::Tensor pixels =
      records.narrow(1, head, kCifarPixels).reshape({-1, 3, kCifarSize, kCifarSize});
  to.add(fit(pixels.clone(), options, path), labels);
}

ImageFiles read_cifar(const std::vector<fs::path>& files, const ImageFileOptions& options) {
  if (!options.labels.empty()) {
    usage_error("the folder '", options.path, "' has CIFAR's files, which number their classes; ",
                "leave out labels = ", join(options.labels), ", which are the names of folders.");
  }
  const bool fine = std::any_of(files.begin(), files.end(),
                                [](const fs::path& p) { return p.filename() == "train.bin"; });
  Builder train, held_out;
  for (const fs::path& file : files) {
    const bool test = file.filename().string().find("test") != std::string::npos;
    add_cifar(file.string(), fine, options, test ? held_out : train);
  }
  require(!train.empty() && !held_out.empty(), "the folder '", options.path, "' has no .bin file ",
          train.empty() ? "to train on" : "with 'test' in its name to hold out", ".");
  ImageFiles out;
  out.train = train.take();
  out.held_out = held_out.take();
  out.classes = fine ? 100 : 10;
  out.mean = fine ? kCifar100Mean : kCifar10Mean;
  out.spread = fine ? kCifar100Spread : kCifar10Spread;
  out.what = fine ? "CIFAR-100" : "CIFAR-10";
  return out;
}

at::Tensor read_pixels(const fs::path& path, const ImageFileOptions& options) {
  const Image image = read_image(path.string());
  const at::Tensor rows = at::from_blob(const_cast<uint8_t*>(image.rgb.data()),
                                        {1, image.height, image.width, 3}, at::kByte);
  return fit(rows.permute({0, 3, 1, 2}).contiguous(), options, path.string());
}

// The images of a class's folder and everything below it, by name.
std::vector<fs::path> images_below(const std::string& folder) {
  std::vector<fs::path> images;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;
    if (entry->path().filename().string().starts_with('.')) {
      entry.disable_recursion_pending();
      continue;
    }
    require(!entry->is_symlink(ignored) || !entry->is_directory(ignored), "the folder '",
            entry->path().string(),
            "' is a link, and a class's links to folders are not followed; ",
            "put the folder itself there, or remove the link.");
    const std::string ending = lower_case(entry->path().extension().string());
    const auto& known = image_extensions();
    if (std::find(known.begin(), known.end(), ending) == known.end() ||
        entry->is_directory(ignored)) {
      continue;
    }
    // To open a pipe would wait for whoever writes to it.
    require(entry->is_regular_file(ignored), "the image '", entry->path().string(),
            "' is no regular file.");
    images.push_back(entry->path());
  }
  if (error) fail("cannot list the folder '", folder, "': ", error.message(), ".");
  require(!images.empty(), "the folder '", folder, "' has no images (", join(image_extensions()),
          ").");
  std::sort(images.begin(), images.end());
  return images;
}

// The folder below `path` with the held-out images, where one has such a name; "" where none has.
std::string held_out_below(const std::string& path) {
  for (const fs::path& entry : entries(path)) {
    const std::string name = lower_case(entry.filename().string());
    std::error_code ignored;
    for (const char* known : {"test", "val", "valid", "validation", "dev"}) {
      if (name == known && fs::is_directory(entry, ignored)) return entry.string();
    }
  }
  return "";
}

// Reads the images of the classes, numbered as `names` has them.
ImageSet read_split(const std::vector<ClassPath>& classes, const std::vector<std::string>& names,
                    const ImageFileOptions& options) {
  Builder builder;
  for (const ClassPath& entry : classes) {
    const int64_t label = class_number(names, entry.name);
    for (const fs::path& path : images_below(entry.path)) {
      builder.add(read_pixels(path, options), label);
    }
  }
  return builder.take();
}

// Of folders `train` and `held_out` with the same classes.
void read_both(const std::string& train, const std::string& held_out,
               const ImageFileOptions& options, ImageFiles& out) {
  const std::vector<ClassPath> kept = classes_below(train, {}), held = classes_below(held_out, {});
  const std::vector<std::string> own = class_names(kept, {}), others = class_names(held, {});
  require(own == others, "the folder '", held_out, "' has the classes ", join(others),
          ", expected those to train on, ", join(own), ".");
  out.names = class_names(kept, options.labels);
  out.train = read_split(kept, out.names, options);
  out.held_out = read_split(held, out.names, options);
}

// Of contiguous bytes.
uint64_t hash_of(const at::Tensor& pixels) {
  StableHash hash;
  hash.add(std::string_view(static_cast<const char*>(pixels.const_data_ptr()),
                            static_cast<size_t>(pixels.numel())));
  return hash.value();
}

// Holds a share of each class out. Where something is trained on, a picture of which a class has
// several copies is taken once: otherwise one of them could be held out.
void read_classes(const ImageFileOptions& options, ImageFiles& out) {
  const std::vector<ClassPath> classes = classes_below(options.path, {});
  out.names = class_names(classes, options.labels);
  const bool all = options.held_out == 1.0;
  Builder kept, held;
  for (const ClassPath& entry : classes) {
    const int64_t label = class_number(out.names, entry.name);
    std::vector<fs::path> paths = images_below(entry.path);
    const auto lot = [&](const fs::path& path) {
      return document_lot(path.lexically_relative(entry.path).generic_string(), kSplitSalt);
    };
    std::stable_sort(paths.begin(), paths.end(),
                     [&](const fs::path& a, const fs::path& b) { return lot(a) < lot(b); });
    std::vector<at::Tensor> pictures;
    std::unordered_set<uint64_t> seen;
    for (const fs::path& path : paths) {
      const at::Tensor pixels = read_pixels(path, options).contiguous();
      if (all || seen.insert(hash_of(pixels)).second) {
        pictures.push_back(pixels);
      } else {
        ++out.copies;
      }
    }
    require(all || pictures.size() >= 2, "the class '", entry.path, "' has one image",
            paths.size() > 1 ? str(" in ", paths.size(), " files") : "",
            ", expected at least two, one to train on and one held out.");
    const auto present = static_cast<int64_t>(pictures.size());
    const int64_t cut = all ? 0 : present - held_out_count(present, options.held_out);
    for (int64_t i = 0; i < present; ++i) {
      (i < cut ? kept : held).add(pictures[static_cast<size_t>(i)], label);
    }
  }
  out.train = kept.take();
  out.held_out = held.take();
}

ImageFiles read_folders(const ImageFileOptions& options) {
  ImageFiles out;
  out.mean = kImageNetMean;
  out.spread = kImageNetSpread;
  const std::string train = options.path + "/train";
  std::error_code ignored;
  const bool split = fs::is_directory(train, ignored);
  const std::string held_out = split ? held_out_below(options.path) : "";
  if (!held_out.empty()) {
    read_both(train, held_out, options, out);
  } else {
    const auto is_folder = [&](const fs::path& entry) { return fs::is_directory(entry, ignored); };
    const std::vector<fs::path> inside = split ? entries(train) : std::vector<fs::path>();
    require(std::none_of(inside.begin(), inside.end(), is_folder), "the folder '", train,
            "' has folders of its own, but '", options.path,
            "' has no folder test, val, valid, validation or dev with the held-out images.");
    read_classes(options, out);
  }
  out.classes = static_cast<int64_t>(out.names.size());
  out.what = str("images of the ", out.classes, " classes in ", options.path);
  return out;
}

}  // namespace

ImageFiles read_image_files(const ImageFileOptions& options) {
  std::error_code ignored;
  require(fs::is_directory(options.path, ignored), "there is no folder '", options.path,
          "' of images.");
  std::vector<fs::path> binaries;
  for (const fs::path& path : entries(options.path)) {
    if (path.extension() == ".bin") binaries.push_back(path);
  }
  return binaries.empty() ? read_folders(options) : read_cifar(binaries, options);
}

}  // namespace headloom::data
