"""The tiny language model that the tests of training train."""

from jaxspec.config.model import ModelConfig, dense_model
from jaxspec.training.data import Corpus


def tiny_lm(corpus: Corpus) -> ModelConfig:
    """A Llama of one layer with the vocabulary of a corpus."""
    return dense_model(
        vocab_size=corpus.vocabulary.size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position=64,
        tie_word_embeddings=True,
        stop_token_ids=(corpus.vocabulary.end_of_text_id,),
    )
