"""Tables of the keys of a Hugging Face ``config.json``, by how jaxspec treats them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMMON_KEYS = words(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings
    original_max_position_embeddings tie_word_embeddings rope_theta rope_scaling rope_parameters
    eos_token_id num_nextn_predict_layers num_mtp_layers mtp_states auto_map"""
)
WINDOW_KEYS = words("use_sliding_window sliding_window max_window_layers layer_types")
# transformers' values of absent keys. None: computed from other keys.
COMMON_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "original_max_position_embeddings": None,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": None,
        "mtp_states": None,  # jaxspec's own key: MtpStates.name, in place of the family's choice
    }
)
# Keys by the type of their values. Sizes are at least 1.
SIZES = words(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings
    sliding_window_pattern _sliding_window_pattern no_rope_layer_interval num_local_experts
    num_experts num_experts_per_tok experts_per_token moe_intermediate_size decoder_sparse_step
    n_routed_experts n_shared_experts share_expert_dim n_group topk_group
    shared_expert_intermediate_size full_attention_interval linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    conv_L_cache block_multiple_of mamba_n_heads mamba_n_groups
    mamba_d_state mamba_d_conv mamba_expand mamba_d_ssm mamba_num_heads mamba_head_dim
    ssm_state_size n_groups conv_kernel moe_shared_expert_intermediate_size top_k_experts
    global_head_dim num_global_key_value_heads"""
)
FLAGS = words(
    """tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob
    use_qk_norm use_expert_bias conv_bias block_auto_adjust_ff_dim mamba_conv_bias
    mamba_proj_bias mamba_rms_norm mamba_norm_before_gate projectors_bias attention_k_eq_v
    enable_moe_block use_double_wide_mlp use_conv_bias use_bias"""
)
# Flags that may not be null: of norm_topk_prob, transformers reads it as false for DeepSeek-V3,
# where an absent key means true, and refuses it for other families. Null is the default for the
# other ones.
NEVER_NULL = words("norm_topk_prob")
NUMBERS = words(  # above 0
    """rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps logit_scale query_pre_attn_scalar
    attn_logit_softcapping
    final_logit_softcapping rope_local_base_freq embedding_multiplier logits_scaling
    residual_multiplier attention_multiplier routed_scaling_factor moe_router_scaling_factor
    swiglu_alpha swiglu_limit lm_head_multiplier key_multiplier attention_in_multiplier
    attention_out_multiplier ssm_in_multiplier ssm_out_multiplier"""
)
OPTIONAL = words(
    "attn_logit_softcapping final_logit_softcapping mamba_d_ssm"
)  # null: there is none

# Keys that do not change the result: training, labels, defaults of generate(), bookkeeping. How
# weights are stored is read by quantization.formats.
HARMLESS_KEYS = words(
    """initializer_range use_cache attention_dropout pretraining_tp dtype torch_dtype
    bos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    transformers_version name_or_path _name_or_path _commit_hash attn_implementation
    _attn_implementation _attn_implementation_autoset return_dict output_hidden_states
    output_attentions output_scores torchscript use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward is_decoder tie_encoder_decoder
    cross_attention_hidden_size finetuning_task task_specific_params problem_type id2label label2id
    num_labels max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_sequence_length
    tokenizer_model_max_length tokenizer_padding_side unsloth_fixed unsloth_version
    output_router_logits router_aux_loss_coef router_jitter_noise
    is_llama_config transformers.js_config quantization_config compression_config"""
)


def is_bookkeeping(key: str) -> bool:
    """Whether a key says nothing of what a model computes, in any family: training, labels,
    defaults of ``generate``, ids of tokens but the one that ends a text."""
    of_token = key.endswith("_token_id") and key != "eos_token_id"
    return key in HARMLESS_KEYS or key.startswith("_") or of_token


# Keys beside the config of a text model, in files that have those of other models, too.
AROUND_KEYS = words(
    """architectures model_type tie_word_embeddings vision_config eos_token_id image_token_id
    video_token_id vision_start_token_id vision_end_token_id language_model_only mm_tokens_per_image
    boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id auto_map
    projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size
    projection_hidden_size projection_layer_norm_eps projector_bias image_token_len patch_token_len
    understand_projector_stride audio_config audio_token_id boa_token_id eoa_token_index
    vision_soft_tokens_per_image video_token_index projector_hidden_size image_seq_length
    image_grid_pinpoints img_token_compression_config process_image_mode merged_hidden_size
    vision_feature_select_strategy"""
)

# Keys that must have one of these values, in families that do not read them.
Allowed = Mapping[str, tuple[Any, ...]]
FIXED_VALUES: Allowed = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "partial_rotary_factor": (None, 1.0),
        "per_layer_config": (None, {}),
        "pruned_heads": (None, {}),
        "is_encoder_decoder": (None, False),
        "add_cross_attention": (None, False),
        "use_mrope": (None, False),
        "rope_interleaved": (None, False),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "use_sliding_window": (None, False),
        "sliding_window": (None,),
    }
)

# Draft heads.
HEAD_ARCHITECTURES = words(
    """LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3Qwen3vlForCausalLM
    Eagle3Qwen3ForCausalLM LlamaForCausalLMEagle EagleLlamaForCausalLM LlamaForCausalLM
    Qwen2ForCausalLM PEagleDraftModel"""
)
# Those of a config.json that the layers of a head have. Others of a model were copied from the
# target: how it ends a text, its experts, its windows.
HEAD_LAYER_KEYS = words(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings
    original_max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor
    attention_bias mlp_bias"""
)
# Of the target's positions in images: those of a text are plain ones.
IMAGE_ROPE_KEYS = words("mrope_section mrope_interleaved")
SPECULATORS_MODEL_TYPES = words("llama mistral qwen2 qwen3")  # of the layers
# Flags of EAGLE-3.1 and the names under which they are published.
HEAD_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fc_norm": ("fc_norm", "use_aux_norm"),
        "norm_before_fc": ("norm_before_fc",),
        "norm_output": ("norm_output", "return_hidden_post_norm"),
    }
)
HEAD_FLAG_NAMES = frozenset(name for names in HEAD_FLAGS.values() for name in names)
# Keys that may stand inside eagle_config too.
NESTED_HEAD_KEYS = HEAD_FLAG_NAMES | words("eagle_aux_hidden_state_layer_ids num_aux_hidden_states")
# Keys that only draft heads have. Those of the second line have no effect: what the target is, and
# how the head was trained.
HEAD_KEYS = NESTED_HEAD_KEYS | words(
    """draft_vocab_size truncated_vocab_size target_hidden_size bias qkv_bias eagle_config
    norm_before_residual use_aux_hidden_state mask_token_id pard_token ptd_token_id
    target_model_type modal_type ttt_length lk_loss_type kl_scale kl_decay"""
)
HEAD_FIXED_VALUES: Allowed = MappingProxyType({"use_aux_hidden_state": (None, True)})
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

# Configs of vLLM's speculators library.
SPECULATORS_ARCHITECTURES = words(
    "Eagle3DraftModel Eagle3Speculator PEagleDraftModel PEagleSpeculator"
)
SPECULATORS_EAGLE = ("eagle3", "peagle")
SPECULATORS_HARMLESS_KEYS = words(
    """model_type auto_map speculators_config speculators_version embed_requires_grad
    has_no_defaults_at_init"""
)
SPECULATORS_FIXED_VALUES: Allowed = MappingProxyType(
    {"speculators_model_type": SPECULATORS_EAGLE, "tie_word_embeddings": (None, False)}
)
