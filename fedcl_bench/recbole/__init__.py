"""RecBole's own models as backbones, one adapter for all of them.

In comes a RecBole model class, out goes a ``Backbone`` whose clients are a batch dimension.
"""
