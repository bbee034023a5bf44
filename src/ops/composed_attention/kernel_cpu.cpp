// The fused kernels of one instruction set: compiled once for each, with
// CPU_CAPABILITY its name.
#include "ops/composed_attention/kernel_by_map.h"

namespace headloom::ops::composed_attention_kernel {
namespace {

template <typename T>
void run(const Args& args, const Plan& plan, const Task& task) {
  for (int64_t i = task.begin; i < task.end; ++i) {
    switch (task.phase) {
      case Phase::kPack:
        pack_block<T>(args, plan, task, i);
        break;
      case Phase::kForward:
        plan.by_map ? forward_by_map<T>(args, plan, task, i) : forward_tile<T>(args, plan, task, i);
        break;
      case Phase::kBackward:
        plan.by_map ? backward_by_map<T>(args, plan, task, i)
                    : backward_tile<T>(args, plan, task, i);
        break;
      case Phase::kReduce:
        reduce_block<T>(args, plan, task, i);
        break;
      case Phase::kBoundary:
        settle<T>(args, plan, task);
        break;
      case Phase::kSplitScores:
        split_scores<T>(args, plan, task);
        if (plan.joined) split_values<T>(args, plan, task);
        break;
      case Phase::kSplitValues:
        split_values<T>(args, plan, task);
        break;
      case Phase::kSplitOutput:
        split_output<T>(args, plan, task);
        break;
    }
  }
}

}  // namespace

void HL_KERNEL(run)(const Args& args, const Plan& plan, const Task& task) {
  const TilesInUse in_use(plan.amx);
  if (args.type == Type::kBFloat16) return run<BFloat16>(args, plan, task);
#if HL_BFLOAT16
  // For floats this set has no instructions of its own. A second build of that code would take
  // long.
  run_AVX512(args, plan, task);
#else
  run<float>(args, plan, task);
#endif
}

}  // namespace headloom::ops::composed_attention_kernel
