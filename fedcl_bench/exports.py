"""What can be imported from the package itself, and the module that each of it is in."""

from __future__ import annotations

MODULES = {"Backbone": "backbone", "BackboneSettings": "backbone", "Catalogue": "metric",
           "DomainMethod": "domain_module", "DomainModule": "domain_module", "Method": "method", "Metric": "metric",
           "Model": "api.model", "ModuleBackbone": "domain_module", "ModuleSettings": "domain_module",
           "RankedLists": "metric", "Results": "api.results", "RunFailed": "errors", "SequentialBackbone": "sequential",
           "SequentialSettings": "sequential", "SessionBackbone": "sequential", "SessionSettings": "sequential",
           "Stage": "domain_module", "TextSettings": "domain_module", "UserError": "errors", "load": "api.loading",
           "run": "api.running", "setting": "settings"}
