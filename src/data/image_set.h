// Labelled pictures in memory, as bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

namespace headloom::data {

struct ImageSet {
  at::Tensor pixels;            // [N, 3, size, size] uint8
  std::vector<int64_t> labels;  // [N]
};

struct ImageFiles {
  ImageSet train, held_out;
  int64_t classes = 0;
  std::vector<std::string> names;      // of the classes; empty for CIFAR's, which are numbers
  std::array<double, 3> mean, spread;  // by which channels are normalised, of values in [0, 1]
  std::string what;                    // "CIFAR-10", "a folder of 3 classes"
  int64_t copies = 0;                  // of pictures that are there already: left out
};

struct ImageFileOptions {
  std::string path;
  std::vector<std::string> labels = {};  // of folders: the classes in their order; empty: by name
  int64_t size = 32;
  bool resize = false;    // to `size` on the shorter side, then the middle is cut out
  double held_out = 0.1;  // share of each class, where the files do not come split
};

// Reads a folder, whole, into memory. What it holds:
//   - .bin files: CIFAR-10 (one label byte, then 3 x 32 x 32) or CIFAR-100 (a coarse and a fine
//     label; train.bin and test.bin), as published. A file with "test" in its name is held out.
//   - sub-folders train and test (or val, valid, validation, dev; capitals do not count), each with
//     a sub-folder a class;
//   - sub-folders, each a class, of which a share is held out by a hash of the names. Of pictures
//     with the same pixels in one class, one is taken, unless all are held out.
// Hidden files and folders are passed over. Throws Error naming the file for one that is broken or
// no regular file, whose label is out of range or whose size is neither `size` nor to be changed,
// and for a folder `train` of folders beside others of which none has a name of held-out data;
// UsageError for a class that `labels` lacks.
ImageFiles read_image_files(const ImageFileOptions& options);

}  // namespace headloom::data
