#include "ops/positionwise/declaration.h"

namespace headloom::ops {

namespace {

Tensor widened(const Tensor& x) { return x.to(at::toOpMathType(x.scalar_type())); }

}  // namespace

Tensor RmsNorm::reference(const Arguments& a) {
  const auto& [x, scale, eps] = a;
  // One kernel on GPUs where its parts have ten. Autocast would widen what it gives.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t width = fixed_size(x, -1);
  if (!scale.defined()) return at::rms_norm(x, width, std::nullopt, eps);
  // That kernel takes a scale of x's type alone.
  const bool same = scale.scalar_type() == x.scalar_type();
  const Tensor wide = same ? x : widened(x);
  return at::rms_norm(wide, width, scale.to(wide.scalar_type()), eps).to(x.scalar_type());
}

Tensor Rotary::reference(const Arguments& arguments) {
  const auto& [x, cos, sin, interleaved] = arguments;
  const int64_t pairs = fixed_size(cos, -1), left = fixed_size(x, -1) - 2 * pairs;
  // A narrow() of everything would be a copy in the backward.
  const Tensor turned = widened(left == 0 ? x : x.narrow(-1, 0, 2 * pairs));
  // [..., P, 2] or [..., 2, P], in which a pair (a, b) becomes (a c, b c) + (b, a) (-s, s).
  const int64_t both = interleaved ? -1 : -2;
  const Tensor apart =
      interleaved ? turned.unflatten(-1, {pairs, 2}) : turned.unflatten(-1, {2, pairs});
  const auto of_pairs = [&](const Tensor& of_first, const Tensor& of_second) {
    return at::stack({of_first, of_second}, both).unsqueeze(-3);  // every head's
  };
  const Tensor out = at::addcmul(apart * of_pairs(cos, cos), apart.flip(both), of_pairs(-sin, sin))
                         .flatten(-2)
                         .to(x.scalar_type());
  return left == 0 ? out : at::cat({out, x.narrow(-1, 2 * pairs, left)}, -1);
}

Tensor GeluTanh::reference(const Arguments& a) { return at::gelu(a.x, "tanh"); }

Tensor Swiglu::reference(const Arguments& a) {
  // The gate alone is widened first: a product with it widens the rest.
  const auto halves = a.x.chunk(2, -1);
  return (at::silu(widened(halves[0])) * halves[1]).to(a.x.scalar_type());
}

}  // namespace headloom::ops
