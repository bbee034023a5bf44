// aft on CPU kernels: causal "local" and "conv" on those of kernel_cpu.cpp, "full" on those of
// kernel_cpu_full.cpp, "simple" on those of wkv.
#include "ops/cpu.h"
#include "ops/aft/declaration.h"
#include "ops/aft/kernel.h"
#include "ops/wkv/cpu.h"
#include "ops/wkv/kernel.h"

namespace headloom::ops {
namespace {

// Weights beyond e^20 or below e^-20 would use up float32's range together with the keys.
constexpr double kMildest = 20;

// Without decay and bonus wkv is the causal "simple", and its outputs are aft's.
static_assert(wkv_kernel::kChunk == aft_kernel::kChunk);
Wkv::Arguments as_wkv(const Aft::Arguments& a) {
  const Tensor none = at::zeros({a.q.size(2)}, a.q.options().dtype(at::kFloat));
  return {a.k,
          a.v,
          none,
          none,
          {.receptance = a.q,
           .state = a.options.state,
           .documents = a.options.documents,
           .backend = {}}};
}

bool is_mild(const Tensor& bias) {
  if (bias.numel() == 0) return true;
  const auto [least, most] = at::aminmax(bias);
  return least.item<double>() >= -kMildest && most.item<double>() <= kMildest;
}

// What the arguments of both families of kernels have.
template <typename KernelArgs>
struct CausalCall : Held {
  KernelArgs args;

  explicit CausalCall(const Aft::Arguments& a) {
    args.T = a.q.size(1);
    args.C = a.q.size(2);
    args.type = kernel_type(a.q);
    args.q = sequence(a.q);
    args.k = sequence(a.k);
    args.v = sequence(a.v);
  }

  // The gradients of q, k and v, for the kernels to write.
  void make_gradients(const Aft::Arguments& a, Aft::Arguments& to) {
    to.q = contiguous_like(a.q);
    to.k = contiguous_like(a.k);
    to.v = contiguous_like(a.v);
    args.grad_q = to.q.data_ptr();
    args.grad_k = to.k.data_ptr();
    args.grad_v = to.v.data_ptr();
  }
};

// The kernels of "local" and "conv".
struct AftCall : CausalCall<aft_kernel::Args> {
  explicit AftCall(const Aft::Arguments& a) : CausalCall(a) {
    args.by_distance = a.options.form == "conv";
    // Of local's table the positions of the call alone; documents begin with its first row.
    if (!args.by_distance && !a.options.documents.defined()) first_entry = a.options.offset;
    entries =
        args.by_distance ? a.options.bias.size(0) : a.options.offset + a.q.size(1) - first_entry;
    const Tensor bias = a.options.bias.narrow(0, first_entry, entries).to(at::kFloat);
    args.B = a.q.size(0);
    args.W = bias.size(1);
    args.bias = whole<float>(bias);
    args.weight = whole<float>(bias.exp());
    args.mild = is_mild(bias);
    args.bias_size = bias.numel();
    heads = args.by_distance ? bias.size(0) : 1;
    args.offset = a.options.offset - first_entry;
    args.state = whole<float>(a.options.state);
    args.documents = whole<int64_t>(a.options.documents);
  }

  int64_t of_head() const { return args.C / heads; }  // channels
  int64_t groups_of_head() const {
    return (of_head() + aft_kernel::kChannels - 1) / aft_kernel::kChannels;
  }
  int64_t tasks() const { return args.B * heads * groups_of_head(); }
  int64_t workers() const { return std::clamp<int64_t>(tasks(), 1, thread_count()); }

  void run(aft_kernel::Run* kernel, bool backward) const {
    const auto work = [&](int64_t worker, int64_t begin, int64_t end) {
      const Tensor scratch =
          at::detail::empty_cpu({aft_kernel::scratch_size(args.W, backward)}, at::kFloat);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / groups_of_head() % heads;
        const int64_t within = i % groups_of_head() * aft_kernel::kChannels;
        kernel(args, {.batch = i / groups_of_head() / heads,
                      .channel = head * of_head() + within,
                      .count = std::min(of_head() - within, aft_kernel::kChannels),
                      .head = head,
                      .worker = worker,
                      .scratch = scratch.data_ptr<float>()});
      }
    };
    for_each_share(tasks(), workers(), work);
  }

  int64_t heads;
  int64_t first_entry = 0, entries;  // rows of the table that the call reads
};

// The kernels of "full".
struct FullCall : CausalCall<aft_kernel::FullArgs> {
  std::vector<aft_kernel::Chunk> chunks;
  int64_t places = 0;  // the longest document

  explicit FullCall(const Aft::Arguments& a) : CausalCall(a) {
    const int64_t* ids = whole<int64_t>(a.options.documents);
    for (int64_t b = 0; b < a.q.size(0); ++b) cut(b, ids, a.options.offset);
    args.chunks = chunks.data();
    args.chunk_count = static_cast<int64_t>(chunks.size());

    Tensor bias = a.options.bias.narrow(0, 0, places).narrow(1, 0, places).to(at::kFloat);
    if (bias.stride(1) != 1) bias = bias.contiguous();
    args.bias = hold(bias).const_data_ptr<float>();
    args.bias_line = bias.stride(0);
    const Tensor weight = hold(bias.exp().contiguous());
    args.weight = weight.const_data_ptr<float>();
    args.weight_line = weight.stride(0);
    args.mild = is_mild(bias);
  }

  // A sequence in chunks of queries.
  void cut(int64_t batch, const int64_t* ids, int64_t offset) {
    const auto count = [&] { return static_cast<int64_t>(chunks.size()); };
    int64_t first = count(), place = offset;
    const auto end_document = [&] {
      for (int64_t i = first; i < count(); ++i) chunks[static_cast<size_t>(i)].last = count() - 1;
      places = std::max(places, place);
      first = count();
    };
    for (int64_t t = 0; t < args.T; ++t, ++place) {
      const int64_t at = batch * args.T + t;
      if (t > 0 && ids != nullptr && ids[at] != ids[at - 1]) {
        end_document();
        place = 0;
      }
      if (count() == first || place % aft_kernel::kFullChunk == 0) {
        chunks.push_back(
            {.batch = batch, .from = t, .to = t, .place = place, .first = first, .last = 0});
      }
      chunks.back().to = t + 1;
    }
    end_document();
  }

  // Tasks that share nothing that they write.
  void run(aft_kernel::RunFull* kernel, int64_t tasks, int64_t floats) const {
    each_task(thread_count(), tasks, [&](int64_t task) {
      const Tensor scratch = at::detail::empty_cpu({floats}, at::kFloat);
      kernel(args, task, scratch.data_ptr<float>());
    });
  }
  void run(aft_kernel::RunFull* kernel) const {
    run(kernel, args.chunk_count * args.groups(), aft_kernel::kFullScratch);
  }
};

std::vector<Tensor> forward_full(const Aft::Arguments& a, bool training) {
  FullCall call(a);
  std::vector<Tensor> out = Aft::outputs(a, training);
  call.args.out = out[0].data_ptr();
  if (training) call.args.sums_out = out[2].data_ptr<float>();
  call.run(HL_CHOOSE(aft_kernel::aft_full));
  return out;
}

void backward_full(const Aft::Arguments& a, Backward<Aft>& b) {
  FullCall call(a);
  aft_kernel::FullArgs& args = call.args;
  const Tensor grad_sums =
      contiguous_float({a.q.size(0), args.groups(), args.T, 2, aft_kernel::kChannels}, a.q);
  const Tensor alone = at::empty({args.chunk_count, args.groups()}, a.q.options().dtype(at::kBool));
  args.sums = call.whole<float>(b.kept[0]);
  args.grad_out = call.sequence(b.grads[0]);
  args.grad_sums = grad_sums.data_ptr<float>();
  args.alone = alone.data_ptr<bool>();
  call.make_gradients(a, b.gradients);
  call.run(HL_CHOOSE(aft_kernel::aft_full_sums));
  call.run(HL_CHOOSE(aft_kernel::aft_full_keys));
  if (!b.wants(b.gradients.options.bias)) return;
  const Tensor& bias = a.options.bias;
  b.gradients.options.bias = at::zeros(bias.sizes(), bias.options().dtype(at::kFloat));
  args.grad_bias = b.gradients.options.bias.data_ptr<float>();
  args.grad_line = bias.size(1);
  const int64_t tasks = (call.places + aft_kernel::kFullChunk - 1) / aft_kernel::kFullChunk;
  call.run(HL_CHOOSE(aft_kernel::aft_full_bias), tasks, aft_kernel::full_scratch_bias(call.places));
}

const char* unsupported(const Aft::Arguments& a) {
  return a.options.causal ? nullptr : "only causal forms are fused";
}

std::vector<Tensor> forward(const Aft::Arguments& a, bool training) {
  if (a.options.form == "simple") return wkv_forward_cpu(as_wkv(a), training);
  if (a.options.form == "full") return forward_full(a, training);
  AftCall call(a);
  std::vector<Tensor> out = Aft::outputs(a, training);
  call.args.out = out[0].data_ptr();
  if (Aft::stateful(a.options)) call.args.end = out[1].data_ptr<float>();
  if (training) call.args.checkpoints_out = out[2].data_ptr<float>();
  call.run(HL_CHOOSE(aft_kernel::aft_forward), false);
  return out;
}

void backward_simple(const Aft::Arguments& a, Backward<Aft>& b) {
  Backward<Wkv> w{.grads = b.grads, .kept = b.kept, .gradients = {}};
  wkv_backward_cpu(as_wkv(a), w);
  b.gradients = {w.gradients.options.receptance, w.gradients.k, w.gradients.v, {}};
  b.gradients.options.state = w.gradients.options.state;
}

void backward(const Aft::Arguments& a, Backward<Aft>& b) {
  if (a.options.form == "simple") return backward_simple(a, b);
  if (a.options.form == "full") return backward_full(a, b);
  AftCall call(a);
  aft_kernel::Args& args = call.args;
  const Tensor& bias = a.options.bias;
  const Tensor sums =
      at::zeros({call.workers(), call.entries, bias.size(1)}, bias.options().dtype(at::kFloat));
  args.checkpoints = call.whole<float>(b.kept[0]);
  args.grad_out = call.sequence(b.grads[0]);
  if (Aft::stateful(a.options)) args.grad_end = call.whole<float>(b.grads[1]);
  call.make_gradients(a, b.gradients);
  args.grad_bias = sums.data_ptr<float>();
  if (a.options.state.defined()) {
    b.gradients.options.state = contiguous_like(a.options.state);
    args.grad_state = b.gradients.options.state.data_ptr<float>();
  }
  call.run(HL_CHOOSE(aft_kernel::aft_backward), true);
  b.gradients.options.bias = at::constant_pad_nd(
      sums.sum(0), {0, 0, call.first_entry, bias.size(0) - call.first_entry - call.entries});
}

const Kernels<Aft> aft_cpu(
    {.limits = "causal", .unsupported = unsupported, .forward = forward, .backward = backward});

}  // namespace
}  // namespace headloom::ops
