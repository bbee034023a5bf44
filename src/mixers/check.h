// Checks of what a user hands to a mixer or a model: every refusal is a UsageError whose sentence
// begins with the module's what() ("mixer 'dcmha'", "model") and names the argument. Sizes stay
// symbolic, so that torch.compile does not specialise on them, and numbers are read only where they
// are there.
#pragma once

#include "mixers/nn.h"

namespace headloom {

// Whether operators on this thread are traced or transformed (fake tensors, export, vmap, grad).
bool is_transforming();
// Whether `t` is a tensor of such a mode.
bool is_transformed(const Tensor& t);
// Whether the numbers of `t` can be read now, without waiting for a device: it is real, not traced,
// and on the CPU.
bool has_numbers(const Tensor& t);

// `t` is neither sparse nor nested.
void check_dense(const Module& module, const char* name, const Tensor& t);
// `t` is dense and [B, T, width] of a floating type, with T of at least 1.
void check_features(const Module& module, const char* name, const Tensor& t, int64_t width);
// `t` is dense and int64 on x's device; `expected` are its sizes and `legend` their names, "[B,
// T]".
void check_ids(const Module& module, const char* name, const Tensor& t,
               c10::SymIntArrayRef expected, const char* legend, const Tensor& x);
// `lengths` is [B] int64 for x [B, T, ...], each from 0 to T.
void check_lengths(const Module& module, const char* name, const Tensor& lengths, const Tensor& x);

}  // namespace headloom
