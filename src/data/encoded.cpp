#include "data/encoded.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <system_error>
#include <tuple>
#include <utility>

#include "core/cache_folder.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/platform.h"
#include "data/unicode.h"
#include "storage/crc64.h"
#include "storage/safetensors.h"

namespace headloom::data {
namespace {

namespace fs = std::filesystem;

// What tokens depend on.
struct TokensKey {
  uint64_t text = 0;       // a checksum of the documents' sizes and texts, in their order
  int64_t bytes = 0;       // of all texts
  uint64_t tokenizer = 0;  // a checksum of its file

  auto tied() const { return std::tie(text, bytes, tokenizer); }
  bool operator<(const TokensKey& other) const { return tied() < other.tied(); }
};

TokensKey key_of(const std::vector<Document>& documents, const Tokenizer& tokenizer) {
  TokensKey key{.tokenizer = tokenizer.checksum()};
  for (const Document& document : documents) {
    const uint64_t size = document.text.size();
    key.text = crc64(key.text, &size, sizeof size);
    key.text = crc64(key.text, document.text.data(), document.text.size());
    key.bytes += static_cast<int64_t>(size);
  }
  return key;
}

template <typename Token>
void count_tokens_as(const at::Tensor& tokens, int64_t begin, int64_t end,
                     std::vector<int64_t>& counts) {
  const Token* all = tokens.const_data_ptr<Token>();
  for (int64_t i = begin; i < end; ++i) ++counts[static_cast<size_t>(all[i])];
}

void release(std::string& text) { std::string().swap(text); }

EncodedDocuments encode_anew(std::vector<Document>& documents, const Tokenizer& tokenizer) {
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> ends;
  int64_t size = 0;
  at::Tensor end;
  for (Document& document : documents) {
    pieces.push_back(tokenizer.encode(document.text));
    release(document.text);
    if (!end.defined()) end = at::full({1}, tokenizer.end_token(), pieces[0].options());
    size += pieces.back().size(0) + 1;
    ends.push_back(size);
    pieces.push_back(end);
  }
  release_free_memory();  // or what is made next lies beside the texts' memory
  if (end.defined()) pieces.push_back(end);
  return {.tokens = pieces.empty() ? at::empty({0}, at::kByte) : at::cat(pieces),
          .ends = at::tensor(ends, at::kLong)};
}

// --- On disk ----------------------------------------------------------------------------------

// One more with every change of what a tokenizer gives, or of the file.
constexpr int64_t kTokensVersion = 1;
constexpr const char* kTokensPrefix = "tokens-";

// Of a file's contents, besides the tokens. Libraries that know other characters cut other words.
at::Tensor label_of(const TokensKey& key, const EncodedDocuments& encoded) {
  Fnv1a libraries;
  libraries.add(unicode_versions());
  uint64_t sum = 0;
  for (const at::Tensor* part : {&encoded.tokens, &encoded.ends}) {
    sum = crc64(sum, part->const_data_ptr(), static_cast<size_t>(part->nbytes()));
  }
  const auto whole = [](uint64_t value) { return static_cast<int64_t>(value); };
  return at::tensor({kTokensVersion, whole(libraries.value()), whole(key.text), key.bytes,
                     whole(key.tokenizer), whole(sum)},
                    at::kLong);
}

fs::path tokens_path(const TokensKey& key) {
  const fs::path folder = cache_folder();
  if (folder.empty()) return {};
  return folder / (kTokensPrefix + str(std::hex, key.text, "-", key.tokenizer));
}

// Nothing where there is none, or not one that can be used.
std::optional<EncodedDocuments> read_tokens(const fs::path& path, const TokensKey& key,
                                            size_t documents) {
  try {
    std::error_code error;
    if (!fs::is_regular_file(path, error)) return std::nullopt;
    std::map<std::string, at::Tensor> parts;
    for (const auto& [name, tensor] : read_safetensors(path.string())) parts[name] = tensor;
    const EncodedDocuments out{.tokens = parts["tokens"], .ends = parts["ends"]};
    const at::Tensor label = parts["label"];
    const bool whole = out.tokens.defined() && out.tokens.dim() == 1 && out.ends.defined() &&
                       out.ends.sizes() == at::IntArrayRef{static_cast<int64_t>(documents)} &&
                       label.defined() && label.scalar_type() == at::kLong &&
                       label.equal(label_of(key, out));
    if (!whole) return std::nullopt;
    fs::last_write_time(path, fs::file_time_type::clock::now(), error);  // it was used
    return out;
  } catch (const Error&) {  // damaged
    return std::nullopt;
  }
}

// What fails here costs nothing but time later.
void write_tokens(const fs::path& path, const TokensKey& key, const EncodedDocuments& encoded) {
  const std::string folder = path.parent_path().string();
  // Several processes may write at once, on several machines, too.
  const fs::path part = path.string() + str(".", ::getpid(), "-", std::random_device()());
  std::error_code ignored;
  try {
    const auto needed = static_cast<int64_t>(encoded.tokens.nbytes() + encoded.ends.nbytes());
    if (needed > kMostKeptTokens) return;
    fs::create_directories(folder, ignored);
    make_room_for_tokens(folder, needed, kMostKeptTokens);
    write_safetensors(
        part.string(),
        {{"tokens", encoded.tokens}, {"ends", encoded.ends}, {"label", label_of(key, encoded)}});
    fs::rename(part, path, ignored);
  } catch (const Error&) {  // a full disk, or no permission
  }
  fs::remove(part, ignored);
}

// From disk, where that is worth it and possible.
EncodedDocuments kept_or_new(const TokensKey& key, std::vector<Document>& documents,
                             const Tokenizer& tokenizer) {
  const bool bytes = tokenizer.checksum() == byte_tokenizer()->checksum();
  const fs::path path = bytes || key.bytes < kLeastKeptText ? fs::path() : tokens_path(key);
  if (path.empty()) return encode_anew(documents, tokenizer);
  if (auto kept = read_tokens(path, key, documents.size())) return *std::move(kept);
  const EncodedDocuments made = encode_anew(documents, tokenizer);
  write_tokens(path, key, made);
  // Mapped memory is shared with the processes that come later.
  auto kept = read_tokens(path, key, documents.size());
  return kept ? *std::move(kept) : made;
}

}  // namespace

int64_t EncodedDocuments::begin(size_t document) const {
  return document == 0 ? 0 : end(document - 1);
}

void count_tokens(const at::Tensor& tokens, int64_t begin, int64_t end,
                  std::vector<int64_t>& counts) {
  switch (tokens.scalar_type()) {
    case at::kByte:
      return count_tokens_as<uint8_t>(tokens, begin, end, counts);
    case at::kShort:
      return count_tokens_as<int16_t>(tokens, begin, end, counts);
    default:
      return count_tokens_as<int32_t>(tokens, begin, end, counts);
  }
}

double piece_bytes(const std::vector<int64_t>& counts, const Tokenizer& tokenizer) {
  double bytes = 0.0;
  for (int64_t token = 0; token < std::ssize(counts); ++token) {
    const auto count = static_cast<double>(counts[static_cast<size_t>(token)]);
    if (count == 0 || token == tokenizer.end_token()) continue;
    bytes += count * static_cast<double>(tokenizer.piece(token).size());
  }
  return bytes;
}

std::shared_ptr<const EncodedDocuments> encode_documents(std::vector<Document>& documents,
                                                         const Tokenizer& tokenizer) {
  static std::mutex mutex;
  static std::map<TokensKey, std::weak_ptr<const EncodedDocuments>> held;
  const TokensKey key = key_of(documents, tokenizer);
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(held, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const EncodedDocuments>& known = held[key];
  std::shared_ptr<const EncodedDocuments> encoded = known.lock();
  if (!encoded) {
    EncodedDocuments made = kept_or_new(key, documents, tokenizer);
    std::vector<int64_t> counts(static_cast<size_t>(tokenizer.vocabulary()));
    count_tokens(made.tokens, 0, made.tokens.size(0), counts);
    made.piece_bytes = piece_bytes(counts, tokenizer);
    encoded = std::make_shared<const EncodedDocuments>(std::move(made));
    known = encoded;
  }
  for (Document& document : documents) release(document.text);
  if (key.bytes >= kLeastKeptText) release_free_memory();
  return encoded;
}

void make_room_for_tokens(const std::string& folder, int64_t needed, int64_t most) {
  struct Kept {
    fs::file_time_type used;
    int64_t bytes;
    fs::path path;
  };
  std::vector<Kept> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().native().starts_with(kTokensPrefix)) continue;
    std::error_code gone;
    const auto used = entry->last_write_time(gone);
    const auto bytes = gone ? 0 : entry->file_size(gone);
    if (!gone) files.push_back({used, static_cast<int64_t>(bytes), entry->path()});
  }
  std::sort(files.begin(), files.end(),
            [](const Kept& a, const Kept& b) { return a.used < b.used; });
  for (const Kept& file : files) needed += file.bytes;
  for (const Kept& file : files) {
    if (needed <= most) return;
    std::error_code stays;
    if (fs::remove(file.path, stays)) needed -= file.bytes;
  }
}

}  // namespace headloom::data
