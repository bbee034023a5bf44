// Pictures: the generated ones, the files that are read, and what is refused.
#include <png.h>
#include <sys/stat.h>

#include <array>
#include <filesystem>
#include <set>

#include "data/image_file.h"
#include "data/random.h"
#include "data/shapes.h"
#include "helpers.h"

#include <jpeglib.h>  // after cstdio

namespace headloom::data::images_test {
namespace {

// height x width pixels of one colour, the top left one of another.
Image picture(int64_t height, int64_t width, uint8_t red, uint8_t green, uint8_t blue) {
  Image image{height, width, {}};
  for (int64_t i = 0; i < height * width; ++i) {
    image.rgb.insert(image.rgb.end(), {red, green, blue});
  }
  image.rgb[0] = static_cast<uint8_t>(255 - red);
  return image;
}

std::string ppm(const Image& image) {
  return str("P6\n# a comment\n", image.width, " ", image.height, "\n255\n") +
         std::string(image.rgb.begin(), image.rgb.end());
}

std::string png(const Image& image, bool transparent = false) {
  png_image out{};
  out.version = PNG_IMAGE_VERSION;
  out.width = static_cast<png_uint_32>(image.width);
  out.height = static_cast<png_uint_32>(image.height);
  out.format = transparent ? PNG_FORMAT_RGBA : PNG_FORMAT_RGB;
  std::vector<uint8_t> pixels = image.rgb;
  if (transparent) pixels.assign(static_cast<size_t>(image.width * image.height * 4), 0);
  png_alloc_size_t size = 0;
  png_image_write_to_memory(&out, nullptr, &size, 0, pixels.data(), 0, nullptr);
  std::string bytes(size, '\0');
  png_image_write_to_memory(&out, bytes.data(), &size, 0, pixels.data(), 0, nullptr);
  bytes.resize(size);
  return bytes;
}

// `inks`: the pixels are cyan, magenta, yellow and black, and what is let through is written.
std::string jpeg(const Image& image, bool inks = false) {
  jpeg_compress_struct out{};
  jpeg_error_mgr errors{};
  out.err = jpeg_std_error(&errors);
  jpeg_create_compress(&out);
  unsigned char* buffer = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&out, &buffer, &size);
  out.image_width = static_cast<JDIMENSION>(image.width);
  out.image_height = static_cast<JDIMENSION>(image.height);
  out.input_components = inks ? 4 : 3;
  out.in_color_space = inks ? JCS_CMYK : JCS_RGB;
  jpeg_set_defaults(&out);
  jpeg_set_quality(&out, 100, TRUE);
  jpeg_start_compress(&out, TRUE);
  for (int64_t row = 0; row < image.height; ++row) {
    auto* pixels =
        const_cast<uint8_t*>(image.rgb.data()) + row * image.width * out.input_components;
    jpeg_write_scanlines(&out, &pixels, 1);
  }
  jpeg_finish_compress(&out);
  jpeg_destroy_compress(&out);
  const std::string bytes(reinterpret_cast<char*>(buffer), size);
  std::free(buffer);
  return bytes;
}

// One pixel of red, green and blue with 16 bits each, without a word about their gamma.
std::string wide_png(std::array<uint16_t, 3> colour) {
  std::string bytes;
  png_structp out = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(out);
  png_set_write_fn(
      out, &bytes,
      [](png_structp to, png_bytep data, size_t size) {
        static_cast<std::string*>(png_get_io_ptr(to))->append(reinterpret_cast<char*>(data), size);
      },
      nullptr);
  png_set_IHDR(out, info, 1, 1, 16, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  png_write_info(out, info);
  png_byte row[6];
  for (size_t c = 0; c < 3; ++c) {
    row[2 * c] = static_cast<png_byte>(colour[c] >> 8);
    row[2 * c + 1] = static_cast<png_byte>(colour[c] & 255);
  }
  png_write_row(out, row);
  png_write_end(out, nullptr);
  png_destroy_write_struct(&out, &info);
  return bytes;
}

std::string read_error(const std::string& path) {
  try {
    read_image(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

TEST(ImageFile, EveryKindGivesThePixelsThatWereWritten) {
  const TempFolder folder;
  const Image image = picture(5, 7, 200, 100, 50);
  for (const auto& [name, bytes] : {std::pair("a.png", png(image)), std::pair("a.ppm", ppm(image)),
                                    std::pair("jpeg.png", jpeg(image))}) {
    SCOPED_TRACE(name);
    const Image read = read_image(folder.write(name, bytes));
    ASSERT_EQ(read.height, 5);
    ASSERT_EQ(read.width, 7);
    ASSERT_EQ(read.rgb.size(), 105u);
    for (size_t i = 30; i < 105; ++i) {
      EXPECT_NEAR(read.rgb[i], image.rgb[i], std::string(name) == "jpeg.png" ? 12 : 0);
    }
  }
  const Image grey = read_image(folder.write("a.pgm", "P5 2 1 255\n" + std::string("\x05\x09")));
  EXPECT_EQ(grey.rgb, (std::vector<uint8_t>{5, 5, 5, 9, 9, 9}));
  const Image wide =
      read_image(folder.write("wide.pgm", "P5 2 1 65535\n" + std::string("\x80\x80\x00\xff", 4)));
  EXPECT_EQ(wide.rgb, (std::vector<uint8_t>{128, 128, 128, 1, 1, 1}));
  const Image low = read_image(folder.write("low.pgm", "P5 2 1 15\n" + std::string("\x05\x0f")));
  EXPECT_EQ(low.rgb, (std::vector<uint8_t>{85, 85, 85, 255, 255, 255}));
  EXPECT_EQ(read_image(folder.write("w.png", wide_png({0x8080, 0x4040, 0xC0C0}))).rgb,
            (std::vector<uint8_t>{128, 64, 192}));
  Image print{8, 8, {}};
  for (int i = 0; i < 64; ++i) print.rgb.insert(print.rgb.end(), {200, 100, 50, 204});
  const Image photograph = read_image(folder.write("print.jpg", jpeg(print, /*inks=*/true)));
  ASSERT_EQ(photograph.rgb.size(), 192u);
  EXPECT_NEAR(photograph.rgb[90], 160, 3);
  EXPECT_NEAR(photograph.rgb[91], 80, 3);
  EXPECT_NEAR(photograph.rgb[92], 40, 3);
  const Image clear = read_image(folder.write("clear.png", png(image, /*transparent=*/true)));
  EXPECT_EQ(clear.rgb, std::vector<uint8_t>(105, 255));
}

TEST(ImageFile, BrokenFilesAreNamedAndNothingCrashes) {
  const TempFolder folder;
  const Image image = picture(40, 40, 200, 100, 50);
  for (const auto& [kind, bytes] : {std::pair("PNG", png(image)), std::pair("JPEG", jpeg(image)),
                                    std::pair("PPM", ppm(image))}) {
    SCOPED_TRACE(kind);
    // Cut anywhere.
    for (size_t keep : {size_t{3}, size_t{10}, bytes.size() / 3, bytes.size() / 2}) {
      const std::string path = folder.write("cut", bytes.substr(0, keep));
      const std::string message = read_error(path);
      expect_contains(message, path);
      EXPECT_TRUE(message.find(std::string("is a broken ") + kind) != std::string::npos ||
                  message.find("is no image") != std::string::npos)
          << message;
    }
    // Bytes changed by lot: an image or a sentence.
    Random random({9});
    for (int i = 0; i < 100; ++i) {
      std::string changed = bytes;
      for (int j = 0; j < 5; ++j) {
        changed[static_cast<size_t>(random.below(static_cast<int64_t>(bytes.size())))] =
            static_cast<char>(random.below(256));
      }
      const std::string message = read_error(folder.write("changed", changed));
      EXPECT_TRUE(message == "(no error)" || message.find("changed'") != std::string::npos);
    }
  }
  EXPECT_EQ(read_error(folder.write("big.ppm", "P6 999999999 999999999 255\nxx")),
            "the image '" + folder.path("big.ppm") +
                "' is a broken PPM file: its size is 999999999 x 999999999 pixels.");
  EXPECT_EQ(read_error(folder.write("a.png", "")),
            "'" + folder.path("a.png") + "' is no image: it is empty.");
  EXPECT_EQ(
      read_error(folder.write("a.png", "GIF89a")),
      "'" + folder.path("a.png") + "' is no image: it is neither PNG, JPEG nor binary PPM or PGM.");
  expect_contains(read_error(folder.path("gone.png")), "gone.png");
}

TEST(Shapes, TheShapeAloneTellsTheClass) {
  // Without noise a picture has its two colours, and mixtures at the shape's edge.
  for (int64_t shape = 0; shape < static_cast<int64_t>(shape_names().size()); ++shape) {
    SCOPED_TRACE(shape_names()[static_cast<size_t>(shape)]);
    double area = 0;
    for (uint64_t i = 0; i < 20; ++i) {
      Random random({i});
      const auto pixels = draw_shape(shape, 32, 0.0, random);
      ASSERT_EQ(pixels.size(), 32u * 32u * 3u);
      std::map<std::vector<uint8_t>, int> colours;
      for (size_t p = 0; p < pixels.size(); p += 3) {
        ++colours[{pixels.begin() + static_cast<int64_t>(p),
                   pixels.begin() + static_cast<int64_t>(p) + 3}];
      }
      std::vector<int> counts;
      for (const auto& [colour, count] : colours) counts.push_back(count);
      std::sort(counts.rbegin(), counts.rend());
      ASSERT_GE(counts.size(), 2u);
      EXPECT_GT(counts[0] + counts[1], 800);
      area += static_cast<double>(counts[1]) / 1024 / 20;
    }
    EXPECT_GT(area, 0.03);
    EXPECT_LT(area, 0.5);
  }
}

TEST(Images, ShapesAreAFunctionOfSeedAndIndex) {
  const std::string config = "type = 'images'\nsize = 16\neval_sequences = 20\nflip = true";
  const auto task = task_of(config, 5);
  EXPECT_EQ(task->goal(), Goal::image_label);
  EXPECT_EQ(task->image_shape(), (std::array<int64_t, 3>{3, 16, 16}));
  EXPECT_EQ(task->classes(), 6);
  EXPECT_EQ(task->vocabulary(), 0);
  EXPECT_EQ(task->length(), 0);
  const Batch third = task->train_batch(3, 4);
  EXPECT_EQ(third.images.sizes(), (at::IntArrayRef{4, 3, 16, 16}));
  EXPECT_EQ(third.images.scalar_type(), at::kFloat);
  EXPECT_EQ(third.targets.sizes(), (at::IntArrayRef{4}));
  EXPECT_FALSE(third.inputs.defined());
  EXPECT_TRUE(same(third, task_of(config, 5)->train_batch(3, 4)));
  EXPECT_FALSE(same(third, task->train_batch(2, 4)));
  EXPECT_FALSE(same(third, task_of(config, 6)->train_batch(3, 4)));
  EXPECT_TRUE(same(slice(third, 2, 2), task->train_batch(7, 2)));
  EXPECT_TRUE(same(task->eval_batch(0, 8), task_of(config, 6)->eval_batch(0, 8)));
  EXPECT_TRUE(same(slice(task->eval_batch(0, 8), 3, 2), task->eval_batch(3, 2)));
  EXPECT_THROW(task->eval_batch(19, 2), Error);
  expect_contains(task->describe(), "circle, square, triangle, cross, ring, star");
  const Batch many = task->train_batch(0, 300);
  EXPECT_NEAR(many.images.mean().item<double>(), 0.0, 0.2);
  EXPECT_NEAR(many.images.std().item<double>(), 1.0, 0.3);
  std::set<int64_t> labels;
  for (int64_t label : row(many.targets.unsqueeze(0), 0)) labels.insert(label);
  EXPECT_EQ(labels, (std::set<int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(task_of("type = 'images'\ngrey = true")->train_batch(0, 2).images.sizes(),
            (at::IntArrayRef{2, 1, 32, 32}));
  // Half of the pictures are mirrored, the held-out ones never.
  const auto plain = task_of("type = 'images'\nsize = 16\neval_sequences = 20", 5);
  EXPECT_TRUE(same(plain->eval_batch(0, 20), task->eval_batch(0, 20)));
  const at::Tensor straight = plain->train_batch(0, 300).images;
  const at::Tensor mirrored = straight.flip({3});
  int flipped = 0;
  for (int64_t i = 0; i < 300; ++i) {
    const bool is_flipped = at::equal(many.images[i], mirrored[i]);
    EXPECT_TRUE(is_flipped || at::equal(many.images[i], straight[i]));
    flipped += is_flipped;
  }
  EXPECT_NEAR(flipped, 150, 45);
}

// A record of a CIFAR file: labels, then a picture whose planes are `red`, 1 and 2.
std::string cifar(std::initializer_list<int> labels, int red) {
  std::string record;
  for (int label : labels) record += static_cast<char>(label);
  return record + std::string(1024, static_cast<char>(red)) + std::string(1024, '\1') +
         std::string(1024, '\2');
}

TEST(Images, CifarFilesAreReadAsPublished) {
  const TempFolder folder;
  folder.write("data_batch_1.bin", cifar({3}, 10) + cifar({9}, 20));
  folder.write("data_batch_2.bin", cifar({0}, 30));
  folder.write("test_batch.bin", cifar({7}, 255));
  const std::string config = "type = 'images'\npath = '" + folder.path() + "'";
  const auto task = task_of(config);
  EXPECT_EQ(task->classes(), 10);
  EXPECT_EQ(task->eval_sequences(), 1);
  expect_contains(task->describe(), "CIFAR-10, 3 to train on, 1 of 1 held out");
  const Batch eval = task->eval_batch(0, 1);
  EXPECT_EQ(eval.targets.item<int64_t>(), 7);
  EXPECT_NEAR(eval.images[0][0][5][5].item<double>(), (1 - 0.4914) / 0.2470, 1e-5);
  EXPECT_NEAR(eval.images[0][2][5][5].item<double>(), (2.0 / 255 - 0.4465) / 0.2616, 1e-5);
  // Every image once an epoch, with its label.
  std::map<int64_t, int64_t> reds;
  const Batch epoch = task->train_batch(0, 3);
  for (int64_t i = 0; i < 3; ++i) {
    const double red = epoch.images[i][0][0][0].item<double>() * 0.2470 + 0.4914;
    reds[epoch.targets[i].item<int64_t>()] = std::lround(255 * red);
  }
  EXPECT_EQ(reds, (std::map<int64_t, int64_t>{{0, 30}, {3, 10}, {9, 20}}));

  EXPECT_EQ(task_of(config + "\nsize = 16\nresize = true")->eval_batch(0, 1).images.size(3), 16);
  expect_contains(error_of(config + "\nsize = 16"), "is 32 x 32 pixels, expected 16 x 16");
  folder.write("data_batch_3.bin", cifar({10}, 1));
  EXPECT_EQ(error_of(config), "'" + folder.path("data_batch_3.bin") +
                                  "' is a broken CIFAR-10 file: its record 0 has the label 10, "
                                  "expected one below 10.");
  folder.write("data_batch_3.bin", "short");
  EXPECT_EQ(error_of(config), "'" + folder.path("data_batch_3.bin") +
                                  "' is no CIFAR-10 file: it has 5 bytes, expected a multiple of "
                                  "3073.");

  const TempFolder fine;
  fine.write("train.bin", cifar({2, 99}, 10));
  expect_contains(error_of("type = 'images'\npath = '" + fine.path() + "'"), "to hold out");
  fine.write("test.bin", cifar({2, 55}, 10));
  const auto hundred = task_of("type = 'images'\npath = '" + fine.path() + "'");
  EXPECT_EQ(hundred->classes(), 100);
  EXPECT_EQ(hundred->eval_batch(0, 1).targets.item<int64_t>(), 55);
}

TEST(Images, FoldersAreClasses) {
  const TempFolder folder;
  for (int i = 0; i < 10; ++i) {
    const auto shade = static_cast<uint8_t>(20 * i);
    folder.write(str("blue/", i, ".png"), png(picture(8, 8, 0, shade, 255)));
    folder.write(str("red/deep/", i, ".PPM"), ppm(picture(8, 8, 255, shade, 0)));
  }
  folder.write("red/notes.txt", "not an image");
  const std::string config = "type = 'images'\nsize = 8\npath = '" + folder.path() + "'";
  const auto task = task_of(config + "\nheld_out = 0.2");
  EXPECT_EQ(task->classes(), 2);
  EXPECT_EQ(task->eval_sequences(), 4);
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const Batch& batch : {task->train_batch(0, 16), task->eval_batch(0, 4)}) {
    for (int64_t i = 0; i < batch.targets.size(0); ++i) {
      const int64_t label = batch.targets[i].item<int64_t>();
      const double blue = batch.images[i][2][4][4].item<double>() * 0.225 + 0.406;
      EXPECT_NEAR(blue, label == 0 ? 1 : 0, 1e-5);
      const double green = batch.images[i][1][4][4].item<double>() * 0.224 + 0.456;
      seen.insert({label, std::lround(255 * green)});
    }
  }
  EXPECT_EQ(seen.size(), 20u);           // nothing twice, nothing left out
  EXPECT_EQ(task->floors().size(), 1u);  // classes of one size
  for (int i = 10; i < 20; ++i) {
    folder.write(str("blue/", i, ".png"), png(picture(8, 8, 0, static_cast<uint8_t>(i), 255)));
  }
  const auto more_blue = task_of(config + "\nheld_out = 0.2")->floors();
  EXPECT_EQ(more_blue.back().name, "the most frequent class");
  EXPECT_DOUBLE_EQ(more_blue.back().accuracy, 4.0 / 6);
  for (int i = 10; i < 20; ++i) std::filesystem::remove(folder.path(str("blue/", i, ".png")));

  // A picture that is there several times would be trained on and held out.
  for (int i = 0; i < 10; ++i) {
    folder.write(str("blue/copy of ", i, ".png"),
                 png(picture(8, 8, 0, static_cast<uint8_t>(20 * i), 255)));
  }
  const auto copied = task_of(config + "\nheld_out = 0.2");
  EXPECT_EQ(copied->data_size().count, 20);
  expect_contains(copied->describe(), "held out, 10 left out as copies of others.");
  EXPECT_EQ(task_of(config + "\nheld_out = 1")->eval_sequences(), 30) << "nothing is trained on";
  for (int i = 0; i < 10; ++i)
    std::filesystem::remove(folder.path(str("blue/copy of ", i, ".png")));

  // The classes keep the numbers of a model, where a folder has not all of them.
  const auto given = task_of(config + "\nlabels = ['red', 'none', 'blue']");
  EXPECT_EQ(given->classes(), 3);
  EXPECT_EQ(given->labels(), (std::vector<std::string>{"red", "none", "blue"}));
  const Batch numbered = given->eval_batch(0, given->eval_sequences());
  for (int64_t i = 0; i < numbered.targets.size(0); ++i) {
    const double blue = numbered.images[i][2][4][4].item<double>() * 0.225 + 0.406;
    EXPECT_EQ(numbered.targets[i].item<int64_t>(), blue > 0.5 ? 2 : 0);
  }
  EXPECT_EQ(error_of<UsageError>(config + "\nlabels = ['red', 'green']"),
            "'" + folder.path("blue") + "' is a class that is not among labels = red, green.");
  EXPECT_EQ(error_of<UsageError>(config + "\nnoise = 0.5"),
            "images has 'noise' and 'path', but what is read from files has no such option; leave "
            "it out.");
  // Copies that an editor keeps are none; a pipe is never waited for.
  folder.write("red/.copies/1.png", png(picture(8, 8, 255, 0, 0)));
  EXPECT_EQ(task_of(config + "\nheld_out = 1")->eval_sequences(), 20);
  ASSERT_EQ(::mkfifo(folder.path("red/pipe.png").c_str(), 0600), 0);
  EXPECT_EQ(error_of(config),
            "the image '" + folder.path("red/pipe.png") + "' is no regular file.");
  std::filesystem::remove(folder.path("red/pipe.png"));
  std::filesystem::create_directory_symlink(folder.path("blue"), folder.path("red/more"));
  expect_contains(error_of(config), "the folder '" + folder.path("red/more") +
                                        "' is a link, and a class's links to folders are not ");
  std::filesystem::remove(folder.path("red/more"));
  folder.write("red/narrow.png", png(picture(1, 3000, 255, 0, 0)));
  expect_contains(
      error_of("type = 'images'\nresize = true\nsize = 64\npath = '" + folder.path() + "'"),
      "narrow.png' is 3000 x 1 pixels, which is too narrow to be scaled to 64 pixels");
  std::filesystem::remove(folder.path("red/narrow.png"));

  // Other pixels, the same classes.
  folder.write("red/deep/3.PPM", ppm(picture(8, 8, 250, 60, 0)));
  const auto repainted = task_of(config + "\nheld_out = 0.2");
  EXPECT_EQ(fingerprint(*repainted, /*pixels=*/false), fingerprint(*task, /*pixels=*/false));
  EXPECT_NE(fingerprint(*repainted, /*pixels=*/true), fingerprint(*task, /*pixels=*/true));

  const std::string odd = folder.write("red/odd.png", png(picture(8, 12, 255, 0, 0)));
  EXPECT_EQ(error_of(config),
            "the image '" + odd + "' is 12 x 8 pixels, expected 8 x 8 (or set resize = true).");
  EXPECT_EQ(task_of(config + "\nresize = true")->train_batch(0, 3).images.size(2), 8);
  folder.write("red/odd.png", png(picture(8, 8, 255, 0, 0)).substr(0, 60));
  expect_contains(error_of(config), "the image '" + odd + "' is a broken PNG file: ");
  folder.write("empty/readme", "no image");
  expect_contains(error_of(config), "empty' has no images (.png, ");
  EXPECT_EQ(error_of("type = 'images'\npath = '/none'"), "there is no folder '/none' of images.");

  const TempFolder split;
  for (const char* part : {"train", "val"}) {
    for (const char* name : {"a", "b"}) {
      split.write(str(part, "/", name, "/1.png"), png(picture(8, 8, 1, 2, 3)));
    }
  }
  const std::string parts = "type = 'images'\nsize = 8\npath = '" + split.path() + "'";
  EXPECT_EQ(task_of(parts)->eval_sequences(), 2);
  split.write("val/c/1.png", png(picture(8, 8, 1, 2, 3)));
  expect_contains(error_of(parts),
                  "val' has the classes a, b, c, expected those to train on, a, b");
  std::filesystem::remove_all(split.path("val/c"));
  std::filesystem::rename(split.path("val"), split.path("Valid"));
  EXPECT_EQ(task_of(parts)->eval_sequences(), 2);
  std::filesystem::rename(split.path("Valid"), split.path("more"));
  EXPECT_EQ(error_of(parts), "the folder '" + split.path("train") +
                                 "' has folders of its own, but '" + split.path() +
                                 "' has no folder test, val, valid, validation or dev with the "
                                 "held-out images.");
}

}  // namespace
}  // namespace headloom::data::images_test
