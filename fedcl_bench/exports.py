"""What can be imported from the package itself, and the module that each of it is in."""

from __future__ import annotations

MODULES = {"Backbone": "backbone", "BackboneSettings": "backbone", "Catalogue": "metric", "Method": "method",
           "Metric": "metric", "Model": "api.model", "RankedLists": "metric", "Results": "api.results",
           "RunFailed": "errors", "SequentialBackbone": "sequential", "SequentialSettings": "sequential",
           "SessionBackbone": "sequential", "SessionSettings": "sequential", "UserError": "errors",
           "load": "api.loading", "run": "api.running", "setting": "settings"}
