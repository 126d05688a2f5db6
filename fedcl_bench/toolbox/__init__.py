"""What plugins are built from: layers, Transformers, distillation, prototypes, clustering, quantisation, item graphs.

In come tensors whose first dimension is clients, where there are many; out come tensors. A plugin imports what it needs
from a module of this room.
"""
