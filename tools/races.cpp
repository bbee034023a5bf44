// Drives the kernels of composed attention and their schedule with std::thread, for a race detector
// (the OpenMP runtime looks like one race to it):
//
//   cmake --preset tsan && cmake --build --preset tsan && ctest --preset tsan
//
// Each case runs forward and backward on one thread and on three; the results must agree, and
// ThreadSanitizer must stay silent.
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "ops/composed_attention/kernel.h"
#include "ops/composed_attention/schedule.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

struct Case {
  const char* name;
  int64_t B = 1, T = 200, S = 200, H = 4, D = 16;
  bool mixes = true;
  int64_t pre_queries = 0, post_queries = 0;
  bool documents = false, bias = false;
};

const Case kCases[] = {
    {.name = "mixes"},
    {.name = "three elements and one", .B = 4, .T = 70, .S = 70},
    {.name = "nothing composed", .mixes = false},
    {.name = "convolutions", .pre_queries = 3, .post_queries = 2},
    {.name = "documents, bias", .pre_queries = 2, .documents = true, .bias = true},
    {.name = "bias", .B = 2, .T = 100, .S = 100, .bias = true},
    {.name = "few queries", .B = 2, .T = 3, .S = 700},
    {.name = "few queries, plain", .B = 2, .T = 3, .S = 700, .mixes = false},
    {.name = "twenty queries", .B = 2, .T = 20, .S = 700},
};

// Owns what the pointers of Args point to.
struct Problem {
  Args args;
  std::vector<std::vector<float>> inputs, outputs;
  std::vector<int64_t> documents;
  std::mt19937 random{7};

  const float* draw(int64_t n) {
    std::vector<float>& x = inputs.emplace_back(n);
    for (float& v : x) v = std::uniform_real_distribution<float>(-0.5F, 0.5F)(random);
    return x.data();
  }
  float* room(int64_t n) { return outputs.emplace_back(n, 0.0F).data(); }

  AnyView weights(int64_t length, int64_t rank, int64_t heads, int64_t batch) {
    AnyView v{draw(batch * length * rank * heads), {length * rank * heads, rank * heads, heads, 1}};
    if (rank == 1) v.stride[2] = 1;  // a gate
    return v;
  }

  Mix mix(const Case& c, int64_t workers) {
    Mix m;
    m.in = m.out = c.H;
    if (!c.mixes) return m;
    m.present = true;
    m.rank = m.q_rank = m.k_rank = 2;
    m.matrix = draw(c.H * c.H);
    m.q_down = weights(c.T, 2, c.H, c.B);
    m.q_up = weights(c.T, 2, c.H, c.B);
    m.q_gate = weights(c.T, 1, c.H, c.B);
    m.k_down = weights(c.S, 2, c.H, c.B);
    m.k_up = weights(c.S, 2, c.H, c.B);
    m.k_gate = weights(c.S, 1, c.H, c.B);
    m.grad = {.matrix = room(workers * c.H * c.H),
              .q_down = room(c.B * c.T * 2 * c.H),
              .q_up = room(c.B * c.T * 2 * c.H),
              .q_gate = room(c.B * c.T * c.H),
              .k_down = room(c.B * c.S * 2 * c.H),
              .k_up = room(c.B * c.S * 2 * c.H),
              .k_gate = room(c.B * c.S * c.H)};
    return m;
  }

  Conv conv(const Case& c, int64_t queries, int64_t workers) {
    Conv out;
    if (queries == 0) return out;
    out.queries = queries;
    out.keys = 5;
    out.left = 2;
    out.kernel = draw(c.H * queries * out.keys);
    out.grad = room(workers * c.H * queries * out.keys);
    return out;
  }

  Problem(const Case& c, int64_t workers) {
    inputs.reserve(64);
    outputs.reserve(64);
    Args& a = args;
    a.B = c.B;
    a.T = c.T;
    a.S = c.S;
    a.H = a.H1 = a.H2 = a.Gk = a.Gv = c.H;
    a.D = a.E = c.D;
    a.scale = 0.25F;
    a.causal = true;
    const int64_t row = c.H * c.D;
    const auto strides = [&](int64_t length, int64_t* to) {
      const int64_t s[] = {length * row, row, c.D, 1};
      std::copy(s, s + 4, to);
    };
    a.q = draw(c.B * c.T * row);
    a.k = draw(c.B * c.S * row);
    a.v = draw(c.B * c.S * row);
    a.grad_out = draw(c.B * c.T * row);
    strides(c.T, a.q_stride);
    strides(c.S, a.k_stride);
    strides(c.S, a.v_stride);
    strides(c.T, a.grad_out_stride);
    a.pre = mix(c, workers);
    a.post = mix(c, workers);
    a.pre_conv = conv(c, c.pre_queries, workers);
    a.post_conv = conv(c, c.post_queries, workers);
    if (c.documents) {
      for (int64_t i = 0; i < c.B * c.S; ++i) documents.push_back(i / 17);
      a.documents = documents.data();
    }
    if (c.bias) {
      const int64_t each = c.H * c.T * c.S;
      a.bias = {draw(each), {0, c.T * c.S, c.S, 1}};
      a.grad_bias = {room(workers * each), {0, c.T * c.S, c.S, 1}};
      a.grad_bias_size = each;
    }
    a.out = room(c.B * c.T * row);
    a.lse = room(c.B * c.H * c.T);
    a.grad_q = room(c.B * c.T * row);
    a.grad_k = room(c.B * c.S * row);
    a.grad_v = room(c.B * c.S * row);
  }

  void run(int64_t workers) {
    for (const bool backward : {false, true}) {
      const Plan plan = make_plan(args, backward, Products::kFloats, workers);
      std::vector<float> memory(memory_floats(args, plan), NAN);
      run_all(args, plan, run_DEFAULT, memory.data(), [](int64_t n, const auto& f) {
        std::vector<std::thread> threads;
        for (int64_t i = 0; i < n; ++i) threads.emplace_back([&f, i] { f(i); });
        for (std::thread& t : threads) t.join();
      });
    }
  }
};

int check(const Case& c) {
  Problem one(c, 1), three(c, 3);
  one.run(1);
  three.run(3);
  double worst = 0;
  for (size_t i = 0; i < one.outputs.size(); ++i) {
    const std::vector<float>& a = one.outputs[i];
    std::vector<float> b = three.outputs[i];  // sums of three workers are still apart
    for (size_t j = a.size(); j < b.size(); ++j) b[j % a.size()] += b[j];
    for (size_t j = 0; j < a.size(); ++j) {
      const double difference = std::abs(a[j] - b[j]);
      worst = difference <= worst ? worst : difference;
    }
  }
  std::printf("%-24s one thread and three differ by at most %.1e\n", c.name, worst);
  return worst < 1e-4 ? 0 : 1;
}

}  // namespace
}  // namespace headloom::ops::composed_attention_kernel

int main() {
  int failed = 0;
  for (const auto& c : headloom::ops::composed_attention_kernel::kCases)
    failed += headloom::ops::composed_attention_kernel::check(c);
  return failed;
}
