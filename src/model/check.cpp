#include "model/check.h"

#include "mixers/check.h"

namespace headloom {
namespace {

// What each kind of model reads.
void check_presence(const Model& model, const ModelInput& in) {
  const std::string& kind = model.config().kind;
  const bool vit = kind == "vit", both = kind == "encoder_decoder",
             single = kind == "decoder" || kind == "encoder";
  const auto needs = [&](const char* name, const Tensor& t, bool wanted) {
    if (t.defined() == wanted) return;
    usage_error(model.what(), ": a model of kind \"", kind, "\" reads ", wanted ? "" : "no ", name,
                wanted ? ", but got none." : ", but got some.");
  };
  const auto takes = [&](const char* name, const Tensor& t, bool reads) {
    if (!reads) needs(name, t, false);
  };
  needs("tokens", in.tokens, !vit);
  needs("images", in.images, vit);
  needs("source", in.source, both);
  takes("lengths", in.lengths, single || both);
  takes("documents", in.documents, single);
  takes("segments", in.segments, single);
  takes("source_lengths", in.source_lengths, both);
}

}  // namespace

void check_tokens(const Model& model, const char* name, const Tensor& tokens) {
  check_dense(model, name, tokens);
  if (tokens.dim() != 2 || !at::isIntegralType(tokens.scalar_type(), /*includeBool=*/false)) {
    usage_error(model.what(), ": ", name, " has shape ", tokens.sym_sizes(), " and type ",
                tokens.scalar_type(), ", expected integers [B, T].");
  }
  if (tokens.sym_size(1) == 0) {
    usage_error(model.what(), ": ", name, " has shape ", tokens.sym_sizes(),
                ", expected at least one position.");
  }
  if (!has_numbers(tokens) || tokens.numel() == 0) return;
  const int64_t vocabulary = *model.config().vocabulary;
  const auto [low, high] = at::aminmax(tokens);
  const int64_t first = low.item<int64_t>(), last = high.item<int64_t>();
  if (first < 0 || last >= vocabulary) {
    usage_error(model.what(), ": ", name, " has the token ", first < 0 ? first : last,
                ", expected one of the vocabulary's 0 to ", vocabulary - 1, ".");
  }
}

void check_source(const Model& model, const Tensor& source, const Tensor& lengths,
                  const c10::SymInt& batch) {
  check_tokens(model, "source", source);
  if (source.sym_size(0) != batch) {
    usage_error(model.what(), ": source has shape ", source.sym_sizes(), ", expected [", batch,
                ", S], a row for each row of tokens.");
  }
  if (lengths.defined()) check_lengths(model, "source_lengths", lengths, source);
}

void check_input(const Model& model, const ModelInput& in) {
  check_presence(model, in);
  const ModelConfig& config = model.config();
  if (config.kind == "vit") {  // which checks the shape itself
    check_dense(model, "images", in.images);
    if (!in.images.is_floating_point()) {
      usage_error(model.what(), ": images must be of a floating type; it is ",
                  in.images.scalar_type(), ".");
    }
    return;
  }
  check_tokens(model, "tokens", in.tokens);
  const auto like_tokens = [&](const char* name, const Tensor& t) {
    if (t.defined()) check_ids(model, name, t, in.tokens.sym_sizes(), "[B, T]", in.tokens);
  };
  if (in.lengths.defined()) check_lengths(model, "lengths", in.lengths, in.tokens);
  like_tokens("documents", in.documents);
  like_tokens("segments", in.segments);
  if (in.source.defined()) {
    check_source(model, in.source, in.source_lengths, in.tokens.sym_size(0));
  }
  const int64_t kinds = config.segments.value_or(0);  // without any the embedding refuses them
  if (!in.segments.defined() || kinds == 0) return;
  if (!has_numbers(in.segments) || in.segments.numel() == 0) return;
  const auto [low, high] = at::aminmax(in.segments);
  if (low.item<int64_t>() < 0 || high.item<int64_t>() >= kinds) {
    usage_error(model.what(), ": segments has ids from ", low.item<int64_t>(), " to ",
                high.item<int64_t>(), ", expected 0 to ", kinds - 1, ".");
  }
}

}  // namespace headloom
