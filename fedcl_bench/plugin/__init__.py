"""What a plugin subclasses, and what the engine asks of it: methods, backbones, sequential backbones, silos, metrics.

In comes what a step of a stream holds; out come losses, scores and states. ``checks.py`` checks what hooks return.
"""
