"""The fields of requests and the paths of vLLM 0.33.0, as its protocol modules and routers
(`vllm/entrypoints`) have them (read on 28 November
2026)."""

_SAMPLING = """frequency_penalty presence_penalty repetition_penalty logit_bias seed stop
stop_token_ids ignore_eos temperature top_p top_k min_p"""
_EVERYWHERE = """model watermarking mm_payload return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs"""
_BOTH = f"""{_SAMPLING} {_EVERYWHERE} n max_tokens stream stream_options user use_beam_search
length_penalty include_stop_str_in_output min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids logprobs
prompt_logprobs logprob_token_ids bad_words add_special_tokens response_format structured_outputs
priority request_id session_id return_tokens_as_token_ids return_token_ids return_weight_versions
routed_experts_prompt_start return_token_offsets repetition_detection thinking_token_budget
stream_interval echo"""

FIELDS: dict[str, frozenset[str]] = {
    "completions": frozenset(f"{_BOTH} prompt suffix prompt_embeds".split()),
    "chat": frozenset(
        f"""{_BOTH} messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
        include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
        return_prompt_text""".split()
    ),
    "responses": frozenset(
        f"""{_SAMPLING} {_EVERYWHERE} background include input instructions max_output_tokens
        max_tool_calls metadata parallel_tool_calls previous_response_id prompt reasoning
        include_reasoning service_tier store stream text tool_choice tools top_logprobs truncation
        user skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
        prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier request_id
        session_id media_io_kwargs mm_processor_kwargs priority enable_response_messages
        previous_input_messages structured_outputs chat_template_kwargs""".split()
    ),
    "messages": frozenset(
        f"""{_EVERYWHERE} messages max_tokens metadata output_config thinking stop_sequences stream
        system temperature tool_choice tools top_k top_p chat_template_kwargs""".split()
    ),
    "count_tokens": frozenset(
        [
            "model",
            "messages",
            "output_config",
            "system",
            "thinking",
            "tool_choice",
            "tools",
            "chat_template_kwargs",
        ]
    ),
    "tokenize": frozenset(
        [
            "model",
            "prompt",
            "add_special_tokens",
            "return_token_strs",
            "messages",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "tools",
        ]
    ),
    "detokenize": frozenset({"model", "tokens"}),
}

# Also those that it has with an option, or in development mode.
PATHS = """POST /v1/completions
POST /v1/chat/completions
POST /v1/responses
GET /v1/responses/{id}
POST /v1/responses/{id}/cancel
POST /v1/messages
POST /v1/messages/count_tokens
GET /v1/models
POST /tokenize
POST /detokenize
GET /tokenizer_info
GET /health
GET /ping
POST /ping
GET /version
GET /metrics
GET /load
POST /pause
POST /resume
GET /is_paused
POST /abort_requests
POST /reset_prefix_cache
POST /update_weight_version
GET /weight_info
POST /v1/chat/completions/batch
POST /v1/chat/completions/render
POST /v1/completions/render
POST /v1/messages/render
POST /v1/responses/render
POST /v1/chat/completions/derender
POST /v1/completions/derender
POST /inference/v1/generate
POST /cohere/v2/chat
POST /cohere/v2/chat/render
POST /v1/decisions
POST /v1/systemone
POST /generative_scoring
POST /v1/embeddings
POST /v2/embed
POST /pooling
POST /classify
POST /score
POST /v1/score
POST /rerank
POST /v1/rerank
POST /v2/rerank
POST /v1/audio/transcriptions
POST /v1/audio/translations
GET /v1/realtime
POST /invocations
POST /v1/load_lora_adapter
POST /v1/unload_lora_adapter
POST /start_profile
POST /stop_profile
GET /server_info
GET /kv_event_sources
POST /reset_mm_cache
POST /reset_encoder_cache
POST /collective_rpc
POST /sleep
POST /wake_up
GET /is_sleeping
POST /release_kv_cache_memory
POST /init_weight_transfer_engine
POST /shutdown_weight_transfer_engine
POST /start_weight_update
POST /start_draft_weight_update
POST /update_weights
POST /finish_weight_update
POST /weight_checker
GET /get_world_size
POST /scale_elastic_ep
POST /is_scaling_elastic_ep
POST /fault_tolerance/apply
GET /fault_tolerance/status""".splitlines()
