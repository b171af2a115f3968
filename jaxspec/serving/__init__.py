"""The OpenAI-compatible server. `jaxspec serve` starts it; `app.make_app` makes the application.

It needs the extra ``serve``.
"""
