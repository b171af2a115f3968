"""Structured output: a request's text matches a JSON schema, regular expression or grammar.

Host code. A GrammarCompiler makes the Matcher of a request; its masks restrict the target's logits
at every node of a draft tree (see functional.constrained). One request, round by round:

    matcher = compiler.matcher(spec)
    prefill with matcher.mask(), then matcher.advance([first token])
    until matcher.finished, or the row is done:
        draft; matcher.masks(tree of the row); verify_drafts; matcher.advance(committed tokens)

llguidance does the work. It is imported when the first GrammarCompiler is made.
"""

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured.compiler import GrammarCompiler
from jaxspec.engine.structured.matcher import GrammarError, GrammarLimit, Matcher, tree_masks

__all__ = [
    "GrammarCompiler",
    "GrammarError",
    "GrammarLimit",
    "Matcher",
    "StructuredOutput",
    "tree_masks",
]
