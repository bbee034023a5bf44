// What the operator refuses, and in which words.
#include "case.h"

namespace headloom::composed_attention_refusals_test {
namespace {

using namespace test;

struct Refusal {
  const char* name;
  void (*apply)(Case&);
  const char* message;  // a part of the sentence
};
std::ostream& operator<<(std::ostream& out, const Refusal& r) { return out << r.name; }

const Refusal kRefusals[] = {
    {"even_conv_both", [](Case& c) { c.o.pre_conv = real({H, 2, 4}); },
     "pre_conv has c_k = 4, expected an odd number"},
    {"even_post_conv_both", [](Case& c) { c.o.post_conv = real({H, 2, 4}); },
     "post_conv has c_k = 4"},
    {"window_zero", [](Case& c) { c.o.window = 0; }, "window is 0, expected at least 1"},
    {"padding_name", [](Case& c) { c.o.conv_padding = "centre"; }, "conv_padding is \"centre\""},
    {"conv_mask_name", [](Case& c) { c.o.conv_mask = "triple"; }, "conv_mask is \"triple\""},
    {"backend_name", [](Case& c) { c.o.backend = "fast"; }, "backend is \"fast\""},
    {"q_dimensions", [](Case& c) { c.q = c.q[0]; }, "q has shape"},
    {"q_integer", [](Case& c) { c.q = c.q.to(at::kLong); }, "q has dtype Long"},
    {"k_head_size", [](Case& c) { c.k = at::randn({B, S, H, D + 1}, kDouble); }, "k has shape"},
    {"k_type", [](Case& c) { c.k = c.k.to(at::kFloat); }, "k has dtype Float"},
    {"v_keys", [](Case& c) { c.v = at::randn({B, S + 1, H, E}, kDouble); }, "v has shape"},
    {"key_heads", [](Case& c) { grouped_heads(c, 4, 2); }, "k has 4 heads, expected a divisor"},
    {"value_heads", [](Case& c) { grouped_heads(c, 2, 4); }, "v has 4 heads, expected a divisor"},
    {"value_heads_after_mix", [](Case& c) { c.o.post.static_matrix = real({H, 4}); },
     "divisor of the 4 output maps"},
    {"conv_heads", [](Case& c) { c.o.pre_conv = real({H - 1, 2, 3}); }, "pre_conv has shape"},
    {"conv_head_groups", [](Case& c) { c.o.pre_conv = real({H, 4, 2, 3}); },
     "pre_conv has groups of 4 heads"},
    {"groups",
     [](Case& c) {
       c.o.pre.groups = 4;
       c.o.pre.q_gate = real({B, T, H});
     },
     "pre.groups is 4, expected a divisor"},
    {"static_rows", [](Case& c) { c.o.pre.static_matrix = real({H + 1, H}); },
     "pre.static has shape"},
    {"static_groups",
     [](Case& c) {
       c.o.post.groups = 2;
       c.o.post.static_matrix = real({H, H});
     },
     "post.static has shape"},
    {"rectangular_with_dynamic",
     [](Case& c) {
       c.o.pre.static_matrix = real({H, 4});
       c.o.pre.q_gate = real({B, T, H});
     },
     "admits no other term"},
    {"down_without_up", [](Case& c) { c.o.pre.q_down = real({B, T, R, H}); },
     "pre.q_down and pre.q_up go together"},
    {"up_without_down", [](Case& c) { c.o.post.k_up = real({B, S, R, H}); },
     "post.k_down and post.k_up go together"},
    {"rank",
     [](Case& c) {
       query_wise(c.o.pre);
       c.o.pre.q_up = real({B, T, R + 1, H});
     },
     "pre.q_up has shape"},
    {"key_weights_of_query_length",
     [](Case& c) {
       c.o.pre.k_down = real({B, T, R, H});
       c.o.pre.k_up = real({B, T, R, H});
     },
     "pre.k_down has shape"},
    {"gate", [](Case& c) { c.o.post.q_gate = real({B, S, H}); }, "post.q_gate has shape"},
    {"bias", [](Case& c) { c.o.bias = real({H, T, S + 1}); }, "bias has shape"},
    {"mask_type", [](Case& c) { c.o.mask = at::ones({T, S}, kDouble); }, "mask has dtype Double"},
    {"mask_per_head", [](Case& c) { c.o.mask = at::rand({B, H, T, S}) > 0; }, "mask has shape"},
    {"lengths_shape", [](Case& c) { c.o.lengths = at::ones({B + 1}, kLong); }, "lengths has shape"},
    {"lengths_type", [](Case& c) { c.o.lengths = at::ones({B}, kDouble); },
     "lengths has dtype Double"},
    {"documents_shape", [](Case& c) { c.o.documents = at::ones({B, T}, kLong); },
     "documents has shape"},
    {"documents_shorter_than_queries",
     [](Case& c) {
       c.q = at::randn({B, S + 1, H, D}, kDouble);
       c.o.documents = at::ones({B, S}, kLong);
     },
     "documents need S >= T"},
};

class ComposedAttentionRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(ComposedAttentionRefuses, InOneSentence) {
  Case c;
  GetParam().apply(c);
  try {
    c.run();
    FAIL() << "accepted";
  } catch (const c10::Error& e) {
    const std::string message = e.what_without_backtrace();
    EXPECT_EQ(message.rfind("composed_attention: ", 0), 0) << message;
    EXPECT_NE(message.find(GetParam().message), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_EQ(message.back(), '.') << message;
  }
}

INSTANTIATE_TEST_SUITE_P(, ComposedAttentionRefuses, ::testing::ValuesIn(kRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace headloom::composed_attention_refusals_test
