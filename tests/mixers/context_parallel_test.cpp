// Context parallelism: processes, here threads, that share out the positions of sequences compute
// what one process computes of the whole ones, and so are their gradients.
#include "mixers/context_parallel.h"

#include <barrier>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "ops/composed_attention/op.h"
#include "support.h"

namespace headloom::context_parallel_test {
namespace {

constexpr int64_t kWidth = 48;

// Threads that talk as processes do.
class Threads {
 public:
  explicit Threads(int64_t size)
      : size_(size), together_(size), slots_(static_cast<size_t>(size)), sent_(slots_.size()) {}

  ContextParallel of(int64_t rank) {
    return {.size = size_,
            .rank = rank,
            .sum =
                [this, rank](const Tensor& t) {
                  const at::NoGradGuard no_grad;
                  t.copy_(at::stack(gathered(t.clone(), rank)).sum(0));
                },
            .gather = [this, rank](const Tensor& own) { return gathered(own.clone(), rank); },
            .start_shift = [this, rank](const Tensor& own,
                                        const Tensor& other) { return shift(own, other, rank); }};
  }
  // Runs f(rank) in all threads.
  template <typename F>
  void run(const F& f) {
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < size_; ++rank) threads.emplace_back([&f, rank] { f(rank); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<Tensor> gathered(const Tensor& own, int64_t rank) {
    slots_[static_cast<size_t>(rank)] = own;
    together_.arrive_and_wait();
    std::vector<Tensor> all = slots_;
    together_.arrive_and_wait();
    return all;
  }
  // What is sent waits in a line of the sender's. Until the end the receiver's memory holds NaN.
  std::function<void()> shift(const Tensor& own, const Tensor& other, int64_t rank) {
    const auto from = static_cast<size_t>((rank + size_ - 1) % size_);
    const at::NoGradGuard no_grad;
    other.fill_(std::numeric_limits<double>::quiet_NaN());
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      sent_[static_cast<size_t>(rank)].push_back(own.clone());
    }
    changed_.notify_all();
    size_t place = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      place = taken_[from]++;
    }
    return [this, from, other, place] {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return sent_[from].size() > place; });
      const at::NoGradGuard no_gradient;
      other.copy_(sent_[from][place]);
    };
  }

  const int64_t size_;
  std::barrier<> together_;
  std::vector<Tensor> slots_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<Tensor>> sent_;  // by sender
  std::map<size_t, size_t> taken_;         // how many of them
};

// The whole of all processes' rows.
Tensor joined(const std::vector<Tensor>& rows) {
  const int64_t batch = rows[0].size(0) / 2;
  std::vector<Tensor> chunks;
  for (const Tensor& own : rows) chunks.push_back(own.narrow(0, 0, batch));
  for (size_t r = rows.size(); r-- > 0;) chunks.push_back(rows[r].narrow(0, batch, batch));
  return at::cat(chunks, 1);
}

struct Case {
  std::string mixer;
  std::string options;  // TOML, one a line
  std::string position = "rope";
  bool bias = false;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.mixer << " {" << c.options << "}";
}

std::vector<Case> cases() {
  return {{"mha", "heads = 6"},
          {"mha", "heads = 6\nkv_heads = 3\nhead_dim = 10\nqk_norm = true", "none", true},
          {"mha", "heads = 4\nkv_heads = 1"},
          {"retention", "heads = 6"},
          {"retention", "heads = 2\nvalue_factor = 0.5\nchunk = 3", "none", true},
          {"mamba", ""},
          {"mamba", "expand = 1\nd_state = 3\nd_conv = 3", "none", true},
          {"mamba", "d_conv = 1"}};
}

struct Result {
  Tensor y, x_gradient;
  std::map<std::string, Tensor> gradients;
};

Result run(TokenMixer& mixer, const Tensor& x, const Tensor& weight) {
  mixer.zero_grad();
  const Tensor in = x.detach().requires_grad_(true);
  Result out{.y = mixer.forward(in, {}), .x_gradient = {}, .gradients = {}};
  (out.y * weight).sum().backward();
  out.x_gradient = in.grad();
  for (const auto& item : mixer.named_parameters()) {
    if (item.value().grad().defined()) out.gradients[item.key()] = item.value().grad();
  }
  return out;
}

class EveryMixer : public testing::TestWithParam<Case> {};

TEST_P(EveryMixer, ComputesWhatOneProcessDoes) {
  const Case& c = GetParam();
  LayerShape shape = test::shape_of(kWidth);
  shape.bias = c.bias;
  shape.position.type = c.position;
  at::manual_seed(7);
  const auto whole = test::mixer(c.mixer, c.options, shape);
  test::add_noise(*whole, 0.1);
  whole->to(at::kDouble);
  for (const auto& [size, length] : {std::pair<int64_t, int64_t>(2, 12), {3, 30}, {4, 64}}) {
    const Tensor x = at::randn({2, length, kWidth}, at::kDouble), weight = at::randn_like(x);
    const Result all = run(*whole, x, weight);
    Threads threads(size);
    std::vector<Result> parts(static_cast<size_t>(size));
    std::vector<std::shared_ptr<TokenMixer>> mixers;
    std::vector<std::shared_ptr<const ContextParallel>> places;
    for (int64_t rank = 0; rank < size; ++rank) {
      places.push_back(std::make_shared<ContextParallel>(threads.of(rank)));
      shape.context_parallel = places.back();
      mixers.push_back(test::mixer(c.mixer, c.options, shape));
      mixers.back()->to(at::kDouble);
      for (const auto& [name, value] : test::parameters(*whole)) {
        test::set(*mixers.back(), name, value);
      }
    }
    threads.run([&](int64_t rank) {
      const auto i = static_cast<size_t>(rank);
      parts[i] = run(*mixers[i], places[i]->rows_of(x), places[i]->rows_of(weight));
    });
    std::vector<Tensor> y, x_gradient;
    for (const Result& part : parts) {
      y.push_back(part.y);
      x_gradient.push_back(part.x_gradient);
    }
    const auto close = [&](const Tensor& a, const Tensor& b, const std::string& what) {
      EXPECT_TRUE(at::allclose(a, b, 1e-9, 1e-10))
          << what << " of " << size << ": " << (a - b).abs().max().item<double>();
    };
    close(joined(y), all.y, "the output");
    close(joined(x_gradient), all.x_gradient, "the gradient of x");
    for (const auto& [name, gradient] : all.gradients) {
      Tensor sum = at::zeros_like(gradient);
      for (const Result& part : parts) sum += part.gradients.at(name);
      close(sum, gradient, name);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(ContextParallel, EveryMixer, testing::ValuesIn(cases()));

TEST(ContextParallel, HasACaseForEveryMixerThatCan) {
  std::set<std::string> tested;
  for (const Case& c : cases()) tested.insert(c.mixer);
  for (const auto& entry : token_mixers()) {
    EXPECT_EQ(tested.contains(entry.name), entry.traits.context_parallel) << entry.name;
  }
}

struct Heads {
  Tensor q, k, v, weight;
  Heads to(at::ScalarType type) const {
    return {q.to(type), k.to(type), v.to(type), weight.to(type)};
  }
};

// The output and the gradients of q, k and v.
std::vector<Tensor> attended(const Heads& h, const ContextParallel* among) {
  const Tensor q = h.q.detach().requires_grad_(true), k = h.k.detach().requires_grad_(true),
               v = h.v.detach().requires_grad_(true);
  const Tensor y = among != nullptr
                       ? ring_attention(q, k, v, *among)
                       : ops::composed_attention(q, k, v, ops::ComposedAttentionOptions());
  (y * h.weight).sum().backward();
  return {y.detach(), q.grad(), k.grad(), v.grad()};
}

std::vector<Tensor> by_threads(const Heads& h, int64_t size) {
  Threads threads(size);
  std::vector<std::vector<Tensor>> parts(static_cast<size_t>(size)), by_tensor(4);
  threads.run([&](int64_t rank) {
    const ContextParallel among = threads.of(rank);
    parts[static_cast<size_t>(rank)] = attended(
        {among.rows_of(h.q), among.rows_of(h.k), among.rows_of(h.v), among.rows_of(h.weight)},
        &among);
  });
  std::vector<Tensor> out;
  for (size_t i = 0; i < 4; ++i) {
    for (const auto& part : parts) by_tensor[i].push_back(part[i]);
    out.push_back(joined(by_tensor[i]));
  }
  return out;
}

Heads random_heads(int64_t length) {
  return {at::randn({2, length, 6, 20}, at::kDouble), at::randn({2, length, 3, 20}, at::kDouble),
          at::randn({2, length, 3, 20}, at::kDouble), at::randn({2, length, 6, 20}, at::kDouble)};
}

TEST(RingAttention, IsAsExactAsAttentionInOneProcess) {
  at::manual_seed(3);
  const Heads h = random_heads(1008);
  const std::vector<Tensor> exact = attended(h, nullptr);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const std::vector<Tensor> plain = attended(h.to(type), nullptr);
    for (const int64_t size : {2, 3}) {
      const std::vector<Tensor> ring = by_threads(h.to(type), size);
      for (size_t i = 0; i < 4; ++i) {
        const auto error = [&](const Tensor& t) {
          return (t.to(at::kDouble) - exact[i]).norm().item<double>();
        };
        EXPECT_EQ(ring[i].scalar_type(), type);
        EXPECT_LT(error(ring[i]), 2 * error(plain[i])) << i << " of " << type;
      }
    }
  }
}

// As scaled_dot_product_attention does, within a chunk also to earlier positions.
TEST(RingAttention, PassesNanOnToNoEarlierChunk) {
  Heads h = random_heads(24).to(at::kFloat);
  h.v[1][10].fill_(std::numeric_limits<double>::quiet_NaN());
  const Tensor y = by_threads(h, 3)[0];
  EXPECT_TRUE(y[0].isfinite().all().item<bool>());
  EXPECT_TRUE(y[1].narrow(0, 0, 8).isfinite().all().item<bool>());
  EXPECT_TRUE(y[1].narrow(0, 10, 14).isnan().all().item<bool>());
}

TEST(ContextParallel, SaysWhatCannotBeShared) {
  const auto refusal = [](const std::string& mixer, const std::string& options,
                          const std::string& position = "rope", int64_t short_conv = 0) {
    LayerShape shape = test::shape_of(kWidth);
    shape.position.type = position;
    shape.short_conv = short_conv;
    shape.context_parallel = std::make_shared<ContextParallel>(
        ContextParallel{.size = 2, .rank = 0, .sum = {}, .gather = {}, .start_shift = {}});
    return test::message_of<UsageError>([&] { test::mixer(mixer, options, shape); });
  };
  EXPECT_EQ(refusal("dcmha", "heads = 6"),
            "dcmha cannot share out the positions of a sequence, but 'train.context_parallel' is "
            "2, expected 1 (headloom list mixers says which can).");
  EXPECT_TRUE(refusal("mha", "heads = 6\nwindow = 5").starts_with("mha: window is 5, but"));
  EXPECT_TRUE(
      refusal("mha", "heads = 6", "alibi").starts_with("mha: position.type is \"alibi\", but"));
  EXPECT_TRUE(refusal("mamba", "", "none", 4).starts_with("mamba: short_conv is 4, but"));
  LayerShape shape = test::shape_of(kWidth);
  shape.context_parallel = std::make_shared<ContextParallel>(
      ContextParallel{.size = 2, .rank = 0, .sum = {}, .gather = {}, .start_shift = {}});
  EXPECT_TRUE(test::message_of<UsageError>([&] {
                test::channel_mixer("rwkv_channel", "", shape);
              }).starts_with("rwkv_channel cannot share out the positions"));
}

}  // namespace
}  // namespace headloom::context_parallel_test
