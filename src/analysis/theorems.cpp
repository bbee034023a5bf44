// The papers' theorems, computed in float64: each says an equality whose error is shown, or an
// inequality with a witness.
#include <ATen/ATen.h>

#include <cmath>

#include "analysis/analysis.h"
#include "core/text.h"
#include "ops/composed_attention/trace.h"
#include "ops/retention/op.h"

namespace headloom::analysis {
namespace {

// The same numbers at every call, and none of the user's.
class Draw {
 public:
  Draw() : generator_(at::detail::createCPUGenerator(1)) {}
  Tensor normal(at::IntArrayRef sizes) { return at::randn(sizes, generator_, at::kDouble); }
  Tensor uniform(at::IntArrayRef sizes) { return at::rand(sizes, generator_, at::kDouble); }

 private:
  at::Generator generator_;
};

double largest(const Tensor& t) { return t.abs().max().item<double>(); }

Tensor matrix(std::vector<double> values, int64_t columns) {
  return at::tensor(values, at::kDouble).view({-1, columns});
}

// --- Xiao et al. 2024, theorems 2.1 and 2.2 -----------------------------------------------------

void composition(Findings& out) {
  constexpr int64_t H = 4, D = 3, C = 12, T = 7, S = 9;
  Draw draw;
  const Tensor x = draw.normal({T, C}), y = draw.normal({S, C}), map = draw.normal({H, H});
  const Tensor q = draw.normal({H, C, D}), k = draw.normal({H, C, D}), v = draw.normal({H, C, D});
  const Tensor o = draw.normal({H, D, C});
  const auto heads = [](const Tensor& input, const Tensor& w) {  // [1, L, H, D]
    return at::einsum("lc,hcd->lhd", {input, w}).unsqueeze(0);
  };
  // The operator's matrix is [from, to], the theorem's C_ij gives map j to head i.
  const auto composed = [&](bool post) {
    ops::ComposedAttentionOptions options;
    options.causal = false;
    (post ? options.post : options.pre).static_matrix = map.t().contiguous();
    ops::ComposedAttentionTrace trace;
    const Tensor out_heads =
        ops::composed_attention_traced(heads(x, q), heads(y, k), heads(y, v), options, trace);
    return std::pair{out_heads[0], trace};
  };
  const double scale = 1 / std::sqrt(static_cast<double>(D));
  Table table{.title = "Composition of maps as composition of projections (Xiao et al. 2024)",
              .columns = {"theorem", "equality", "largest error", "size"}};
  {
    const Tensor scores = composed(false).second.scores.after[0];  // [H, T, S]
    Tensor expanded = at::empty_like(scores);
    const Tensor all_k = k.permute({1, 0, 2}).flatten(1);  // Concat_j W_j^K, [C, H D]
    for (int64_t i = 0; i < H; ++i) {
      const Tensor all_q = (map[i].view({H, 1, 1}) * q).permute({1, 0, 2}).flatten(1);
      expanded[i] = at::matmul(at::matmul(x, all_q), at::matmul(y, all_k).t()) * scale;
    }
    table.rows.push_back({std::string("2.1"),
                          std::string("scores composed by C = scores of Concat_j[C_ij W_j^Q] and "
                                      "Concat_j[W_j^K]"),
                          largest(scores - expanded), largest(scores)});
  }
  {
    const auto [values, trace] = composed(true);  // [T, H, D]
    const Tensor output = at::einsum("thd,hdc->tc", {values, o});
    const Tensor weights = trace.weights.before[0];  // [H, T, S], not composed
    const Tensor all_o = o.flatten(0, 1);            // W^O, [H D, C]; each head reads all of it
    const auto expanded = [&](const Tensor& c) {
      Tensor sum = at::zeros({T, C}, at::kDouble);
      for (int64_t i = 0; i < H; ++i) {
        const Tensor all_v = (c[i].view({H, 1, 1}) * v).permute({1, 0, 2}).flatten(1);  // [C, H D]
        sum += at::matmul(at::matmul(weights[i], at::matmul(y, all_v)), all_o);
      }
      return sum;
    };
    table.rows.push_back({std::string("2.2"),
                          std::string("weights composed by C = values Concat_j[C_ji W_j^V], W^O "
                                      "tiled H times"),
                          largest(output - expanded(map.t())), largest(output)});
    table.rows.push_back({std::string("2.2"),
                          std::string("the same with C_ij, as equation 2 prints it: equal for a "
                                      "symmetric C only"),
                          largest(output - expanded(map)), largest(output)});
  }
  const double e1 = std::get<double>(table.rows[0][2]), e2 = std::get<double>(table.rows[1][2]);
  out.sentences.push_back(str("Theorems 2.1 and 2.2 hold to ", formatted("%.1e", std::max(e1, e2)),
                              ": composing ", H, " maps of head size ", D,
                              " is attention with heads of size ", H * D,
                              ". In 2.2 the value of head i takes column i of C."));
  out.tables.push_back(std::move(table));
}

// --- Bhojanapalli et al. 2020, theorem 1 --------------------------------------------------------

// Softmax down each column, as the paper has it.
Tensor column_softmax(const Tensor& scores) { return at::softmax(scores, 0); }

void representation(Findings& out) {
  constexpr int64_t n = 6;
  Draw draw;
  Tensor p = draw.uniform({n, n}) + 0.02;
  p = p / p.sum(0, true);
  Table table{.title =
                  "Any positive P from a head of size d at least n (Bhojanapalli et al. 2020, "
                  "theorem 1), n = 6",
              .columns = {"d", "construction", "largest error of P"}};
  double worst = 0;
  for (const int64_t d : {n, n + 3, 4 * n}) {
    const Tensor x = draw.normal({d, n});
    const Tensor inverse = at::linalg_pinv(x);            // [n, d], inverse x = I
    const Tensor d0 = at::diag(draw.uniform({n}) + 0.5);  // any positive diagonal
    const Tensor target = at::log(at::matmul(p, d0)) * std::sqrt(static_cast<double>(d));
    const Tensor padding = at::zeros({d - n, n}, at::kDouble);
    const Tensor wk = at::matmul(at::cat({at::eye(n, at::kDouble), padding}), inverse);
    const Tensor wq = at::matmul(at::cat({target, padding}), inverse);
    const Tensor scores =
        at::matmul(at::matmul(wk, x).t(), at::matmul(wq, x)) / std::sqrt(static_cast<double>(d));
    const double error = largest(column_softmax(scores) - p);
    worst = std::max(worst, error);
    table.rows.push_back(
        {d, std::string("W_k = [I; 0] X^+, W_q = [sqrt(d) log(P D_0); 0] X^+"), error});
  }
  // Below n: scores of rank d. Columns may be shifted without a change of P, so the mean goes
  // first.
  const Tensor logs = at::log(p);
  const Tensor centred = logs - logs.mean(0, true);
  const auto [u, s, v] = at::linalg_svd(centred, /*full_matrices=*/false);
  for (int64_t d = n - 1; d >= 1; --d) {
    const Tensor scores = at::matmul(u.narrow(1, 0, d) * s.narrow(0, 0, d), v.narrow(0, 0, d));
    table.rows.push_back({d, std::string("scores of rank d for any X: leading components of log P"),
                          largest(column_softmax(scores) - p)});
  }
  out.sentences.push_back(str("Theorem 1: the construction gives P to ", formatted("%.1e", worst),
                              " where d >= n. Below, scores have rank d at most: with n - 1 they "
                              "still could be P's, because softmax ignores a column's mean, if X "
                              "let them, which the counterexample's does not."));
  out.tables.push_back(std::move(table));

  // The paper's counterexample: d = 1, n = 2, X = [1, 0].
  const Tensor wanted = matrix({0.5, 0.75, 0.5, 0.25}, 2);
  const Tensor x = matrix({1, 0}, 2);
  double least = 1;
  for (double w = -50; w <= 50; w += 0.01) {  // w = W_k W_q is all that counts
    const Tensor map = column_softmax(at::matmul(x.t(), x) * w);
    least = std::min(least, largest(map - wanted));
  }
  out.tables.push_back(
      {.title = "The counterexample for d = 1, n = 2: X = [1, 0], P = [[0.5, 0.75], [0.5, 0.25]]",
       .columns = {"least error over W_k W_q from -50 to 50", "why"},
       .rows = {
           {least, std::string("the second column of every map is (0.5, 0.5), off by 0.25")}}});
}

// --- Bhojanapalli et al. 2020, theorem 2 --------------------------------------------------------

// One attention layer: per head k, q [D, d], and the product o v [d, d].
struct Layer {
  Tensor k, q, ov;  // [h, D, d], [h, D, d], [h, d, d]
};

// sum_i W_o W_v X softmax((W_k X)^T (W_q X) / sqrt(D)), columns of X are tokens.
Tensor apply(const Layer& layer, const Tensor& x) {
  const Tensor scores =
      at::matmul(at::matmul(layer.k, x).transpose(-1, -2), at::matmul(layer.q, x)) /
      std::sqrt(static_cast<double>(layer.k.size(1)));
  return at::matmul(at::matmul(layer.ov, x), at::softmax(scores, -2)).sum(0);
}

// How far from `fixed` the layer with heads of size 1 stays that gradient descent finds from the
// best start, the same values: mean squared error over mean square.
double error_of_training(const Layer& fixed, Draw& draw) {
  const int64_t h = fixed.k.size(0), d = fixed.k.size(2), n = 3;
  const at::AutoGradMode with_gradients(true);
  Layer other{draw.normal({h, 1, d}), draw.normal({h, 1, d}), Tensor()};
  Tensor wo = draw.normal({h, d, 1}), wv = draw.normal({h, 1, d});
  std::vector<Tensor> trained = {other.k, other.q, wo, wv}, first, second;
  for (Tensor& t : trained) {
    t.requires_grad_(true);
    first.push_back(at::zeros_like(t.detach()));
    second.push_back(at::zeros_like(t.detach()));
  }
  const Tensor x = draw.normal({64, 1, d, n});
  const auto of_all = [&](const Layer& layer) {
    const Tensor scores =
        at::matmul(at::matmul(layer.k, x).transpose(-1, -2), at::matmul(layer.q, x)) /
        std::sqrt(static_cast<double>(layer.k.size(1)));
    return at::matmul(at::matmul(layer.ov, x), at::softmax(scores, -2)).sum(1);
  };
  const Tensor target = of_all(fixed).detach();
  double error = 0;
  for (int step = 1; step <= 600; ++step) {
    other.ov = at::matmul(wo, wv);
    const Tensor loss = (of_all(other) - target).square().mean() / target.square().mean();
    error = loss.item<double>();
    loss.backward();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < trained.size(); ++i) {  // Adam
      const Tensor g = trained[i].grad();
      first[i].mul_(0.9).add_(g, 0.1);
      second[i].mul_(0.99).addcmul_(g, g, 0.01);
      trained[i].sub_(0.02 * (first[i] / (1 - std::pow(0.9, step))) /
                      ((second[i] / (1 - std::pow(0.99, step))).sqrt() + 1e-12));
      trained[i].mutable_grad().zero_();
    }
  }
  return error;
}

constexpr int64_t kWitnessLength = 3;  // columns of a witness X

// How far apart the outputs of two layers are at X.
double apart_at(const Layer& a, const Layer& b, const Tensor& x) {
  return largest(apply(a, x) - apply(b, x));
}

// The proof's three cases: how far a layer with heads of size 1 is from `fixed` at the witness X.

// Case 1: sum W_o W_v differs from sum V_o V_v.
double apart_in_sums(const Layer& fixed, Draw& draw) {
  const int64_t h = fixed.k.size(0), d = fixed.k.size(2);
  const Layer other{draw.normal({h, 1, d}), draw.normal({h, 1, d}),
                    fixed.ov + 0.1 * draw.normal({h, d, d})};
  const Tensor gap = (other.ov - fixed.ov).sum(0);
  const Tensor v = std::get<2>(at::linalg_svd(gap))[0];
  return apart_at(other, fixed, v.unsqueeze(1).expand({d, kWitnessLength}));
}

// Case 2: the sums are equal, and U - W_k^T W_q is not skew-symmetric.
double apart_by_gap(const Layer& fixed, const Tensor& u, Draw& draw) {
  const int64_t h = fixed.k.size(0), d = fixed.k.size(2);
  const Layer other{draw.normal({h, 1, d}), draw.normal({h, 1, d}), fixed.ov};
  const Tensor gap = u - at::matmul(other.k[0].t(), other.q[0]);
  const auto [values, vectors] = at::linalg_eigh((gap + gap.t()) / 2);
  const Tensor v = vectors.select(1, values.abs().argmax().item<int64_t>());
  Tensor x = at::zeros({d, kWitnessLength}, at::kDouble);
  x.select(1, 0).copy_(v);
  return apart_at(other, fixed, x);
}

// Case 3: the sums are equal, and W_k = W_q = e1, so that what is left of U is skew-symmetric.
double apart_by_skew_gap(const Layer& fixed, const Tensor& u) {
  const int64_t h = fixed.k.size(0), d = fixed.k.size(2);
  const Tensor e1 = at::eye(d, at::kDouble)[0];
  const Tensor first = e1.view({1, 1, d}).expand({h, 1, d});
  const Layer other{first, first, fixed.ov};
  const Tensor gap = u - at::matmul(other.k[0].t(), other.q[0]);
  double most = 0;
  for (const double size : {0.5, 1.0, 2.0}) {
    Tensor x = at::zeros({d, kWitnessLength}, at::kDouble);
    x.select(1, 0).copy_(e1);
    x.select(1, 1).copy_(size * at::matmul(gap, e1));
    most = std::max(most, apart_at(other, fixed, x));
  }
  return most;
}

void fixed_head_size(Findings& out) {
  constexpr int64_t d = 4, h = 4, dp = 2;  // heads of the other layer have size d / h = 1
  Draw draw;
  // U / sqrt(d_p) = e1 e1^T + e1 e2^T - e2 e1^T, of rank d_p = 2, the same in every head, and
  // sum V_o V_v = M of full rank: the theorem's conditions.
  const Tensor unit = at::eye(d, at::kDouble);
  const double root = std::sqrt(static_cast<double>(dp));
  const Tensor vk = at::stack({unit[0], unit[1]});  // [dp, d]
  const Tensor vq = root * at::stack({unit[0] + unit[1], -unit[0]});
  const Tensor u = at::matmul(vk.t(), vq) / root;
  const Tensor m = draw.normal({d, d});
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < h; ++i) parts.push_back(at::outer(m.select(1, i), unit[i]));  // rank 1
  const Layer fixed{vk.expand({h, dp, d}), vq.expand({h, dp, d}), at::stack(parts)};
  Table table{.title =
                  "No layer with heads of size C / H is this one with heads of size 2: C = 4, "
                  "H = 4 (theorem 2)",
              .columns = {"case", "the layer of size-1 heads", "witness X", "largest difference"}};
  double least = 1e9;
  const auto add = [&](const char* number, const char* which, const char* witness, double value) {
    least = std::min(least, value);
    table.rows.push_back({std::string(number), std::string(which), std::string(witness), value});
  };
  add("1", "sum W_o W_v differs from sum V_o V_v", "v 1^T, v the gap's first singular vector",
      apart_in_sums(fixed, draw));
  add("2", "sums are equal, and U - W_k^T W_q is not skew-symmetric", "v e_1^T",
      apart_by_gap(fixed, u, draw));
  add("3", "sums are equal, and U - W_k^T W_q is skew-symmetric in every head", "[v_1, v_2, 0]",
      apart_by_skew_gap(fixed, u));
  table.rows.push_back({std::string("trained"),
                        std::string("600 steps of Adam towards the other layer's outputs"),
                        std::string("64 random X: mean squared error / mean square"),
                        error_of_training(fixed, draw)});
  out.sentences.push_back(
      str("Theorem 2: the proof's three cases each have an X at which the layers differ, here by ",
          formatted("%.2g", least), " or more."));
  out.tables.push_back(std::move(table));
}

// --- Sun et al. 2023: the three forms ------------------------------------------------------------

void retention_forms(Findings& out) {
  // A worked example: gamma = 1/4, without scale, rotation or norm.
  const auto bthd = [](const Tensor& t) { return t.unsqueeze(0).unsqueeze(2); };
  const Tensor q = bthd(matrix({1, 2, 1, 3, 2, 3}, 3)), k = bthd(matrix({1, 2, 3, 4, 5, 6}, 3));
  const Tensor v = bthd(matrix({5, 4, 3, 2, 1, 0}, 3)), gamma = at::full({1}, 0.25, at::kDouble);
  const Tensor expected = matrix({40, 32, 24, 100, 56, 12}, 3);
  Table table{.title =
                  "RetNet's three forms on Q = [[1,2,1],[3,2,3]], K = [[1,2,3],[4,5,6]], V = "
                  "[[5,4,3],[2,1,0]], gamma = 1/4",
              .columns = {"form", "first row", "second row", "largest error"}};
  const auto row_text = [](const Tensor& row) {
    std::vector<std::string> numbers;
    for (int64_t i = 0; i < row.size(0); ++i) {
      numbers.push_back(formatted("%.10g", row[i].item<double>()));
    }
    return join(numbers, " ");
  };
  double worst = 0;
  for (const char* form : {"parallel", "recurrent", "chunkwise"}) {
    ops::RetentionOptions options;
    options.form = form;
    options.chunk = 1;
    options.backend = "reference";
    const Tensor o = std::get<0>(ops::retention(q, k, v, gamma, options))[0].select(1, 0);
    worst = std::max(worst, largest(o - expected));
    table.rows.push_back(
        {std::string(form), row_text(o[0]), row_text(o[1]), largest(o - expected)});
  }
  out.sentences.push_back(
      str("RetNet's three forms agree on the worked example, to ", formatted("%.1e", worst), "."));
  out.tables.push_back(std::move(table));
}

// --- Oren et al. 2024: TOVA is a multi-state RNN -------------------------------------------------

// Plain attention, with weights of unit scale, so that it is not nearly uniform.
std::shared_ptr<TokenMixer> drawn_attention(int64_t width, int64_t heads, Draw& draw) {
  LayerShape shape;
  shape.width = width;
  shape.position.type = "none";
  const auto spec = make_spec(token_mixers(), "token mixer", "mha");
  read_fields(parse_toml(str("heads = ", heads), "theorems"), *spec);
  const std::shared_ptr<TokenMixer> mixer = [&] {
    const WithoutValues none_drawn;  // the user's random numbers stay as they are
    return spec->build(shape);
  }();
  mixer->to(at::kDouble);
  mixer->eval();
  for (Tensor p : mixer->parameters()) p.copy_(draw.normal(p.sizes()) / 2);
  return mixer;
}

// The same attention over x [1, T, C] as a recurrence h_t = f(x_t, h_{t-1}), whose state is at most
// `budget` pairs (k, v).
Tensor multi_state_recurrence(const TokenMixer& mixer, int64_t heads, const Tensor& x,
                              int64_t budget) {
  const auto parameters = mixer.named_parameters();
  const Tensor qkv = parameters["qkv.weight"], output = parameters["output.weight"];
  const int64_t size = x.size(2) / heads;
  Tensor keys = at::empty({0, heads, size}, at::kDouble), values = keys;
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < x.size(1); ++t) {
    const auto part = at::matmul(qkv, x[0][t]).view({3, heads, size}).unbind(0);
    keys = at::cat({keys, part[1].unsqueeze(0)});
    values = at::cat({values, part[2].unsqueeze(0)});
    const Tensor scores =
        at::einsum("hd,shd->hs", {part[0], keys}) / std::sqrt(static_cast<double>(size));
    const Tensor p = at::softmax(scores, -1);
    rows.push_back(at::matmul(output, at::einsum("hs,shd->hd", {p, values}).flatten()));
    if (keys.size(0) <= budget) continue;
    const Tensor kept = std::get<0>(std::get<1>(p.mean(0).topk(budget)).sort());
    keys = keys.index_select(0, kept);
    values = values.index_select(0, kept);
  }
  return at::stack(rows).unsqueeze(0);
}

// Decodes x [1, T, C] under the policy tova, which keeps `budget` positions.
Tensor decoded_by_tova(TokenMixer& mixer, const Tensor& x, int64_t budget) {
  MixerState state = mixer.initial_state(CachePolicy::parse(str("tova:", budget)));
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < x.size(1); ++t) {
    rows.push_back(mixer.extend(x.narrow(1, t, 1), state, {}));
  }
  return at::cat(rows, 1);
}

void multi_state_rnn(Findings& out) {
  constexpr int64_t width = 16, heads = 2, length = 24;
  Draw draw;
  const std::shared_ptr<TokenMixer> mixer = drawn_attention(width, heads, draw);
  const Tensor x = draw.normal({1, length, width});
  const Tensor whole = mixer->forward(x, {});
  Table table{.title = str("TOVA as a multi-state RNN, ", length, " positions"),
              .columns = {"states kept", "decoding - recurrence", "decoding - full attention"}};
  double worst = 0;
  for (const int64_t budget : {length, length / 2, length / 4, length / 8}) {
    const Tensor y = decoded_by_tova(*mixer, x, budget);
    const double error = largest(y - multi_state_recurrence(*mixer, heads, x, budget));
    worst = std::max(worst, error);
    table.rows.push_back({budget, error, largest(y - whole)});
  }
  out.sentences.push_back(
      str("Decoding under tova:M is the recurrence whose state is M pairs of key "
          "and value, to ",
          formatted("%.1e", worst), "; with as many states as positions it is full attention."));
  out.tables.push_back(std::move(table));
}

}  // namespace

Findings theorems(const Subject&) {
  Findings out{.title = "Theorems, computed in float64"};
  composition(out);
  representation(out);
  fixed_head_size(out);
  retention_forms(out);
  multi_state_rnn(out);
  return out;
}

}  // namespace headloom::analysis
