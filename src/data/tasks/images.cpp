// images: the class of a picture, for vision transformers.
//
// Without `path` pictures of shapes are made up (data/shapes.h): the shape is the class; colours,
// place, size, turn and noise tell nothing. With it they are read (data/image_set.h). Pixels are
// normalised by the channels' mean and spread: of the published training sets for CIFAR, ImageNet's
// for folders, 0.3 and 0.25 for shapes.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/sizes.h"
#include "core/text.h"
#include "data/floors.h"
#include "data/image_set.h"
#include "data/random.h"
#include "data/shapes.h"
#include "data/stream.h"
#include "data/tasks/tasks.h"

namespace headloom::data {
namespace {

constexpr uint64_t kShapeStream = 3;
constexpr uint64_t kFlipStream = 4;

struct ImagesOptions {
  std::optional<std::string> path;
  std::vector<std::string> labels;
  int64_t size = 32;
  bool resize = false;
  double held_out = 0.1;
  int64_t classes = 6;
  double noise = 0.1;
  bool grey = false;
  bool flip = false;
  int64_t eval_sequences = 512;
};

class Images : public Task {
 public:
  Goal goal() const final { return Goal::image_label; }
  int64_t vocabulary() const final { return 0; }
  int64_t length() const final { return 0; }
  std::array<int64_t, 3> image_shape() const final {
    return {options_.grey ? 1 : 3, options_.size, options_.size};
  }
  Accuracy accuracy() const final { return Accuracy::token; }
  std::vector<int64_t> encode(std::string_view) const final {
    usage_error("the task images has no text.");
  }
  std::string decode(const std::vector<int64_t>&) const final { return ""; }

  Batch train_batch(int64_t index, int64_t batch_size) const final {
    const int64_t first = index * batch_size;
    Batch batch = pictures(false, first, batch_size);
    for (int64_t i = 0; options_.flip && i < batch_size; ++i) {
      Random random({seed_, kFlipStream, static_cast<uint64_t>(first + i)});
      if (random.below(2) == 0) continue;
      const at::Tensor image = batch.images[i];
      image.copy_(image.flip({2}));
    }
    return batch;
  }
  Batch eval_batch(int64_t first, int64_t count) const final {
    check_held_out(first, count, eval_sequences());
    return pictures(true, first, count);
  }

 protected:
  Images(const ImagesOptions& options, uint64_t seed, const std::array<double, 3>& mean,
         const std::array<double, 3>& spread)
      : options_(options), seed_(seed) {
    const auto column = [](const std::array<double, 3>& values) {
      return at::tensor(at::ArrayRef<double>(values), at::kFloat).view({1, 3, 1, 1});
    };
    mean_ = column(mean);
    spread_ = column(spread);
  }

  virtual Batch pictures(bool held_out, int64_t first, int64_t count) const = 0;

  // [B, 3, size, size] bytes as the model sees them.
  Batch batch_of(const at::Tensor& pixels, const std::vector<int64_t>& labels) const {
    at::Tensor images = pixels.to(at::kFloat).div_(255).sub_(mean_).div_(spread_);
    if (options_.grey) {
      // The usual weights of the channels' brightness (ITU-R BT.601).
      const at::Tensor weight = at::tensor({0.299f, 0.587f, 0.114f}).view({1, 3, 1, 1});
      images = (images * weight).sum(1, /*keepdim=*/true);
    }
    return {.targets = at::tensor(labels, at::kLong), .images = images.contiguous()};
  }

  const ImagesOptions options_;
  const uint64_t seed_;

 private:
  at::Tensor mean_, spread_;  // [1, 3, 1, 1]
};

class Shapes final : public Images {
 public:
  Shapes(const ImagesOptions& options, uint64_t seed)
      : Images(options, seed, {0.3, 0.3, 0.3}, {0.25, 0.25, 0.25}) {}

  int64_t classes() const override { return options_.classes; }
  int64_t eval_sequences() const override { return options_.eval_sequences; }
  std::string describe() const override {
    const auto& names = shape_names();
    return str("Pictures of ", options_.size, " x ", options_.size, " pixels, each of a ",
               join({names.begin(), names.begin() + options_.classes}), ", which is the answer; ",
               "generated, ", eval_sequences(), " held out.");
  }

 protected:
  // Two streams of their own: that a picture with its noise is in both cannot happen.
  Batch pictures(bool held_out, int64_t first, int64_t count) const override {
    at::Tensor pixels = at::empty({count, options_.size, options_.size, 3}, at::kByte);
    uint8_t* to = pixels.data_ptr<uint8_t>();
    std::vector<int64_t> labels;
    for (int64_t i = first; i < first + count; ++i) {
      Random random({held_out ? 0 : seed_, kShapeStream, held_out, static_cast<uint64_t>(i)});
      labels.push_back(random.below(options_.classes));
      const auto picture = draw_shape(labels.back(), options_.size, options_.noise, random);
      to = std::copy(picture.begin(), picture.end(), to);
    }
    return batch_of(pixels.permute({0, 3, 1, 2}), labels);
  }
};

class FolderOfImages final : public Images {
 public:
  FolderOfImages(const ImagesOptions& options, uint64_t seed, ImageFiles files)
      : Images(options, seed, files.mean, files.spread),
        files_(std::move(files)),
        order_(seed, static_cast<int64_t>(files_.train.labels.size()), 1) {
    // Whatever part of it is evaluated should be a fair sample.
    Random random({0});
    for (size_t i = 0; i < files_.held_out.labels.size(); ++i) {
      eval_order_.push_back(static_cast<int64_t>(i));
    }
    random.shuffle(eval_order_);
  }

  int64_t classes() const override { return files_.classes; }
  int64_t eval_sequences() const override {
    return std::min<int64_t>(options_.eval_sequences, static_cast<int64_t>(eval_order_.size()));
  }
  std::vector<std::string> labels() const override { return files_.names; }
  DataSize data_size() const override {
    return {static_cast<int64_t>(files_.train.labels.size() + files_.held_out.labels.size()),
            "images"};
  }
  std::vector<Floor> floors_of(const std::vector<int64_t>& judged) const override {
    std::vector<int64_t> labels;
    for (const int64_t i : judged) {
      const auto place = static_cast<size_t>(eval_order_[static_cast<size_t>(i)]);
      labels.push_back(files_.held_out.labels[place]);
    }
    std::vector<Floor> floors = Task::floors_of(judged);
    add_floor(floors, "the most frequent class", usual_share(files_.train.labels, labels));
    return floors;
  }
  std::string describe() const override {
    return str("Pictures of ", options_.size, " x ", options_.size, " pixels: ", files_.what, ", ",
               files_.train.labels.size(), " to train on, ", eval_sequences(), " of ",
               eval_order_.size(), " held out",
               files_.copies > 0 ? str(", ", files_.copies, " left out as copies of others") : "",
               ".");
  }

 protected:
  Batch pictures(bool held_out, int64_t first, int64_t count) const override {
    if (!held_out && files_.train.labels.empty()) {
      usage_error("the task has held_out = 1: there is nothing to train on");
    }
    const std::vector<int64_t> chosen =
        held_out
            ? std::vector<int64_t>(eval_order_.begin() + first, eval_order_.begin() + first + count)
            : order_.starts(first, count);
    const ImageSet& set = held_out ? files_.held_out : files_.train;
    std::vector<int64_t> labels;
    for (int64_t i : chosen) labels.push_back(set.labels[static_cast<size_t>(i)]);
    return batch_of(set.pixels.index_select(0, at::tensor(chosen, at::kLong)), labels);
  }

 private:
  ImageFiles files_;
  WindowOrder order_;
  std::vector<int64_t> eval_order_;
};

struct ImagesSpec final : TaskSpec {
  ImagesOptions options;

  std::string type() const override { return "images"; }
  std::vector<std::string>* labels() override { return &options.labels; }
  void fields(Fields& f) override {
    f.field("path", options.path,
            "folder of CIFAR .bin files, or with a sub-folder of images (PNG, JPEG, binary PPM or "
            "PGM) a class; "
            "absent: shapes");
    f.field("labels", options.labels,
            "with path: the sub-folders in the order of their classes; absent: those found, by "
            "name");
    f.field("size", options.size, "pixels of a side", between<int64_t>(4, 4096));
    f.field("resize", options.resize, "with path: scale and crop images of another size");
    f.field(
        "held_out", options.held_out,
        "with path: share of each class kept for evaluation where the files do not say, at most "
        "0.5; 1: all, to evaluate only",
        Range<double>{.low = 0.0, .high = 1.0, .open_low = true});
    f.field("classes", options.classes, "generated: the first so many of " + join(shape_names()),
            between<int64_t>(2, static_cast<int64_t>(shape_names().size())));
    f.field("noise", options.noise, "generated: spread of what is added to each pixel's 0 to 1",
            between(0.0, 1.0));
    f.field("grey", options.grey, "one channel instead of three");
    f.field("flip", options.flip, "mirror half of the training images, left to right");
    f.field("eval_sequences", options.eval_sequences, "held-out images, the same for every seed",
            size_from(1));
  }
  std::vector<DataPath> data_paths() override {
    if (!options.path) return {};
    return {{"path", &*options.path}};
  }
  void hold_out_all() override {
    options.held_out = 1.0;
    options.eval_sequences = std::numeric_limits<int64_t>::max();
  }
  std::shared_ptr<Task> build(uint64_t seed) const override {
    check_no_idle_options(*this);
    if (!options.path) return std::make_shared<Shapes>(options, seed);
    if (options.held_out > 0.5 && options.held_out < 1.0) {
      usage_error("images has held_out = ", options.held_out,
                  ", expected at most 0.5, or 1 to evaluate all of them");
    }
    return std::make_shared<FolderOfImages>(options, seed,
                                            read_image_files({.path = *options.path,
                                                              .labels = options.labels,
                                                              .size = options.size,
                                                              .resize = options.resize,
                                                              .held_out = options.held_out}));
  }
};

}  // namespace

std::shared_ptr<TaskSpec> images_spec() { return std::make_shared<ImagesSpec>(); }

}  // namespace headloom::data
