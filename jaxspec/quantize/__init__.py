"""Makes quantized checkpoints: rounding, AWQ and GPTQ, one layer at a time.

``rounding``, ``awq`` and ``gptq`` are pure functions of a projection's weights [out, in] and of
what is known of its inputs. ``layers`` runs a model's layers one by one over text; ``methods``
quantizes a layer; ``run`` does it for a whole checkpoint; ``writing`` writes the formats that
checkpoints/formats/ reads.
"""
