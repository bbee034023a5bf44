// The makers of the registered task specs, each with its defaults; options are set through
// fields().
#pragma once

#include "data/task.h"

namespace headloom::data {

inline constexpr const char* kTokenizerHelp =
    "\"bytes\", a tokenizer.json (byte-level BPE, WordPiece) or a SentencePiece *.model";

std::shared_ptr<TaskSpec> text_spec();
std::shared_ptr<TaskSpec> jsonl_spec();
std::shared_ptr<TaskSpec> token_shard_spec();
std::shared_ptr<TaskSpec> find_block_spec();
std::shared_ptr<TaskSpec> recall_spec();
std::shared_ptr<TaskSpec> mqar_spec();
std::shared_ptr<TaskSpec> forgetting_mqar_spec();
std::shared_ptr<TaskSpec> compositional_mqar_spec();
std::shared_ptr<TaskSpec> in_context_recall_spec();
std::shared_ptr<TaskSpec> noisy_in_context_recall_spec();
std::shared_ptr<TaskSpec> fuzzy_in_context_recall_spec();
std::shared_ptr<TaskSpec> selective_copying_spec();
std::shared_ptr<TaskSpec> memorization_spec();
std::shared_ptr<TaskSpec> compression_spec();
std::shared_ptr<TaskSpec> head_composition_spec();
std::shared_ptr<TaskSpec> copy_spec();
std::shared_ptr<TaskSpec> induction_spec();
std::shared_ptr<TaskSpec> needle_spec();
std::shared_ptr<TaskSpec> masked_text_spec();
std::shared_ptr<TaskSpec> classify_text_spec();
std::shared_ptr<TaskSpec> classify_pairs_spec();
std::shared_ptr<TaskSpec> tag_text_spec();
std::shared_ptr<TaskSpec> find_span_spec();
std::shared_ptr<TaskSpec> sequence_spec();
std::shared_ptr<TaskSpec> images_spec();

}  // namespace headloom::data
