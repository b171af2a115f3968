"""The keys of a Hugging Face ``config.json``, by what jaxspec makes of them: tables only."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclasses.dataclass(frozen=True)
class Family:
    """A ``model_type``: its class name, and the keys it reads besides COMMON_KEYS."""

    architecture: str
    keys: frozenset[str]


COMMON_KEYS = words(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings
    original_max_position_embeddings tie_word_embeddings rope_theta rope_scaling rope_parameters
    eos_token_id"""
)
WINDOW_KEYS = words("use_sliding_window sliding_window max_window_layers layer_types")
FAMILIES = MappingProxyType(
    {
        "llama": Family("LlamaForCausalLM", words("attention_bias mlp_bias")),
        "mistral": Family("MistralForCausalLM", words("sliding_window")),
        "qwen2": Family("Qwen2ForCausalLM", WINDOW_KEYS),
        "qwen3": Family("Qwen3ForCausalLM", WINDOW_KEYS | {"attention_bias"}),
    }
)
# By rope_type, the parameters that it must have, and may have besides the type itself.
ROPE_NEEDS = MappingProxyType(
    {
        "default": words("rope_theta"),
        "llama3": words(
            """rope_theta factor low_freq_factor high_freq_factor
            original_max_position_embeddings"""
        ),
    }
)

# Training, labels, defaults of generate(), bookkeeping: none of it changes what the model computes.
HARMLESS_KEYS = words(
    """initializer_range use_cache attention_dropout pretraining_tp dtype torch_dtype
    bos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    transformers_version name_or_path _name_or_path _commit_hash attn_implementation
    _attn_implementation_autoset return_dict output_hidden_states output_attentions output_scores
    torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder tie_encoder_decoder
    cross_attention_hidden_size finetuning_task task_specific_params problem_type id2label label2id
    num_labels max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_sequence_length
    tokenizer_model_max_length tokenizer_padding_side unsloth_fixed unsloth_version"""
)

# Keys understood at these values only, in families that do not read them.
Allowed = Mapping[str, tuple[Any, ...]]
FIXED_VALUES: Allowed = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "partial_rotary_factor": (None, 1.0),
        "quantization_config": (None,),
        "per_layer_config": (None, {}),
        "pruned_heads": (None, {}),
        "is_encoder_decoder": (None, False),
        "add_cross_attention": (None, False),
        "use_mrope": (None, False),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "sliding_window": (None,),
    }
)

# Draft heads.
HEAD_ARCHITECTURES = words(
    """LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM LlamaForCausalLMEagle EagleLlamaForCausalLM
    LlamaForCausalLM Qwen2ForCausalLM"""
)
# Keys that only draft heads have (target_model_type informs the reader, nothing more).
HEAD_KEYS = words(
    """draft_vocab_size target_hidden_size num_aux_hidden_states bias qkv_bias eagle_config
    eagle_aux_hidden_state_layer_ids norm_before_residual target_model_type"""
)
HEAD_FIXED_VALUES: Allowed = MappingProxyType({"norm_before_residual": (None, False)})
EAGLE_CONFIG_FIXED_VALUES: Allowed = MappingProxyType(
    {
        "use_aux_hidden_state": (None, True),
        "use_input_layernorm_in_first_layer": (None, True),
        "use_last_layernorm": (None, True),
        "use_mtp_layernorm": (None, False),
        "next_layer_regular": (None, True),
        "parallel_draft_step": (None, 1),
        "parallel_draft_heads_num_layers": (None,),
    }
)
