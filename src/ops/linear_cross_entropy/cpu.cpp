// linear_cross_entropy on the CPU: some positions at a time, the products of all threads and a
// kernel between them.
#include <cmath>
#include <optional>

#include "ops/cpu.h"
#include "ops/linear_cross_entropy/declaration.h"
#include "ops/linear_cross_entropy/kernel.h"
#include "ops/product/product.h"

namespace headloom::ops {
namespace {

// Scores of so many bytes stay in the third level of cache, which all threads share.
constexpr int64_t kCachedBytes = int64_t{16} << 20;
// Scores of no more bytes keep their memory from step to step.
constexpr int64_t kKeptBytes = int64_t{128} << 20;
// A piece has at least this many positions for each value of a hidden state.
constexpr int64_t kWorthAdding = 4;

// The positions whose target is a class.
std::vector<int64_t> counted(const Tensor& targets, int64_t classes) {
  std::vector<int64_t> out;
  const Tensor values = targets.contiguous();
  const int64_t* const target = values.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < values.numel(); ++n) {
    if (target[n] == kIgnoredTarget) continue;
    TORCH_CHECK_INDEX(target[n] >= 0 && target[n] < classes,
                      "linear_cross_entropy: targets has the class ", target[n],
                      ", expected one of 0 to ", classes - 1, " or ", kIgnoredTarget, ".");
    out.push_back(n);
  }
  return out;
}

// Scores of some positions at a time, a row each.
struct ScoreRows {
  int64_t rows = 0;   // at most so many at a time; 0 where no position counts
  int64_t apart = 0;  // elements from one row's beginning to the next
};

ScoreRows score_rows(const LinearCrossEntropy::Arguments& a, int64_t count) {
  // Rows begin at a line of the cache, and are not a multiple of a page apart, so that the same
  // columns of some rows do not take each other's places.
  const int64_t size = static_cast<int64_t>(a.hidden.element_size());
  const int64_t classes = a.weight.size(0), cache_line = 64 / size, page = 4096 / size;
  int64_t apart = (classes + cache_line - 1) / cache_line * cache_line;
  if (apart % (page / 4) == 0) apart += cache_line;
  const int64_t bytes = apart * size;
  // So few positions that their scores stay in the cache, unless their products would take less
  // time than adding to the whole gradient of the weight once more.
  const int64_t cached = std::max(kCachedBytes / bytes, kWorthAdding * a.hidden.size(1));
  const int64_t most = std::max<int64_t>(1, std::min(kScoreBytes / bytes, cached));
  const int64_t pieces = (count + most - 1) / most;
  return {.rows = pieces > 0 ? (count + pieces - 1) / pieces : 0, .apart = apart};
}

// The gradient of the weight: a sum over pieces of the positions, in float32.
class WeightGradient {
 public:
  // `out` is of the weight's type.
  WeightGradient(const Tensor& out, bool several) : out_(out) {
    if (!several || out.scalar_type() == at::kFloat) return;
    piece_ = contiguous_like(out);
    sum_ = contiguous_float(out.sym_sizes(), out);
  }
  void add(const Tensor& scores, const Tensor& hidden) {
    product(sum_.defined() ? piece_ : out_, scores.t(), hidden, {}, !sum_.defined() && !first_);
    if (sum_.defined()) first_ ? sum_.copy_(piece_) : sum_.add_(piece_);
    first_ = false;
  }
  void finish() {
    if (first_) out_.zero_();
    if (!first_ && sum_.defined()) out_.copy_(sum_);
  }

 private:
  const Tensor out_;
  Tensor piece_, sum_;  // where `out` is too narrow to sum in
  bool first_ = true;
};

std::vector<Tensor> forward(const LinearCrossEntropy::Arguments& a, bool training) {
  static linear_cross_entropy_kernel::Run* const kernel =
      HL_CHOOSE(linear_cross_entropy_kernel::run);
  std::vector<Tensor> out = LinearCrossEntropy::outputs(a, training);
  const int64_t positions = a.hidden.size(0), classes = a.weight.size(0);
  const std::vector<int64_t> counts = counted(a.targets, classes);
  const auto count = static_cast<int64_t>(counts.size());
  const bool all = count == positions;
  const Tensor index = at::tensor(at::IntArrayRef(counts), a.targets.options());
  const Tensor targets = all ? a.targets.contiguous() : a.targets.index_select(0, index);
  const Tensor best = at::empty({count}, a.targets.options());
  std::vector<float> sums(counts.size()), below(counts.size());

  const auto [rows, apart] = score_rows(a, count);
  thread_local KeptMemory kept(kKeptBytes);
  const int64_t room_bytes = rows * apart * static_cast<int64_t>(a.hidden.element_size());
  const Tensor room = kept.bytes(room_bytes)
                          .narrow(0, 0, room_bytes)
                          .view(a.hidden.scalar_type())
                          .view({rows, apart})
                          .narrow(1, 0, classes);
  std::optional<WeightGradient> of_weight;
  if (training) {
    if (!all) out[2].zero_();
    of_weight.emplace(out[3], /*several=*/count > rows);
    if (a.bias.defined()) out[4].zero_();
  }
  linear_cross_entropy_kernel::Args args;
  args.classes = classes;
  args.apart = apart;
  args.type = kernel_type(a.hidden);
  args.gradient = training;
  args.scores = room.data_ptr();
  for (int64_t first = 0; first < count; first += rows) {
    const int64_t n = std::min(rows, count - first);
    const Tensor place = all ? Tensor() : index.narrow(0, first, n);
    const Tensor hidden = all ? a.hidden.narrow(0, first, n) : a.hidden.index_select(0, place);
    const Tensor scores = room.narrow(0, 0, n);
    product(scores, hidden, a.weight.t(), a.bias);
    args.targets = targets.const_data_ptr<int64_t>() + first;
    args.sums = sums.data() + first;
    args.below = below.data() + first;
    args.best = best.data_ptr<int64_t>() + first;
    at::parallel_for(0, n, grain(classes),
                     [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
    if (!training) continue;
    if (all) {
      product(out[2].narrow(0, first, n), scores, a.weight);
    } else {
      const Tensor grad = at::empty({n, a.hidden.size(1)}, a.hidden.options());
      product(grad, scores, a.weight);
      out[2].index_copy_(0, place, grad);
    }
    of_weight->add(scores, hidden);
    if (a.bias.defined()) out[4].add_(scores.sum(0, /*keepdim=*/false, at::kFloat));
  }
  if (training) of_weight->finish();
  double loss = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    loss += std::log(static_cast<double>(sums[i])) + static_cast<double>(below[i]);
  }
  out[0].fill_(loss);
  if (all) {
    out[1].copy_(best);
  } else {
    out[1].fill_(-1).index_copy_(0, index, best);
  }
  return out;
}

void backward(const LinearCrossEntropy::Arguments& a, Backward<LinearCrossEntropy>& b) {
  LinearCrossEntropy::Arguments& to = b.gradients;
  // What no position that counts has a part in stays 0, whatever the loss's gradient is.
  const Tensor ignored = a.targets.eq(kIgnoredTarget);
  const Tensor grad = ignored.all().item<bool>() ? at::zeros_like(b.grads[0]) : b.grads[0];
  if (b.wants(to.hidden)) {
    to.hidden = (b.kept[0] * grad).masked_fill_(ignored.unsqueeze(1), 0);
  }
  if (b.wants(to.weight)) to.weight = b.kept[1] * grad;
  if (a.bias.defined() && b.wants(to.bias)) to.bias = b.kept[2] * grad;
}

const Kernels<LinearCrossEntropy> linear_cross_entropy_cpu(
    {.limits = "with dense products of some positions at a time",
     .forward = forward,
     .backward = backward});

}  // namespace
}  // namespace headloom::ops
