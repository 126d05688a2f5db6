"""Which of RecBole's models can be backbones, found out by running each on a made-up stream of two blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable

import torch

from ..data.stream import Stream
from ..errors import RunFailed, UserError
from ..evaluation.ranking import EvaluationSettings
from ..federation.loop import run
from ..federation.parts import Federation, FederationSettings
from ..method import Method, NoSettings
from ..recbole import models
from ..recbole.backbone import RecBoleBackbone, backbone_class
from ..recbole.domain_backbone import refusal
from ..sampling import LocalSettings
from .worlds import growing_stream

SAMPLES = {"point": "item, label", "pair": "item, negative", "group": "item, all its negatives",
           "target": "sequence, next item", "target pair": "sequence, next item, negative", "user": "the whole history"}


@dataclass(frozen=True)
class SurveyedModel:
    """What became of one model.

    Attributes:
        kind: ``general`` or ``sequential``.
        status: ``vectorised``, ``one by one`` or ``refused``.
        why: the operators that vmap does not take, or the reason of the refusal; empty if vectorised.
        samples: what a sample of its loss is.
        private: parameters that stay at the client.
        domains: whether domains can train it, or why not; empty for general models, which read no sequences.
    """

    name: str
    kind: str
    status: str
    why: str = ""
    samples: str = ""
    private: tuple[str, ...] = ()
    domains: str = ""


def try_model(name: str, stream: Stream) -> SurveyedModel:
    """Try one model with RecBole's own hyper-parameters, at clients of one user each and, if sequential, at domains."""
    if models.names()[name] == "general":
        return _with_clients(name, stream)
    why = refusal(name)
    usable = "yes, reading texts" if name in models.READS_TEXT else "yes"
    return replace(_with_clients(name, stream), domains=f"refused: {why}" if why else usable)


def _with_clients(name: str, stream: Stream) -> SurveyedModel:
    """Build, check and train one model with RecBole's own hyper-parameters for two blocks of one round."""
    kind, cls = models.names()[name], backbone_class(name)
    try:
        backbone: RecBoleBackbone = cls(cls.Settings(max_length=8))
        for _ in run(Federation(stream, backbone, Method(NoSettings()), LocalSettings(optimiser="adam", negatives=2),
                                FederationSettings(rounds=1), EvaluationSettings(topk=(5,), valid_metric="ndcg@5"), 0)):
            pass
    except UserError as error:
        reason = str(error).splitlines()[0].removeprefix(f"backbone '{cls.name}' ").rstrip(".")
        return SurveyedModel(name, kind, "refused", reason)
    except Exception as error:  # a model's own code; the reason belongs into the table, not a traceback
        text = "diverges" if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}".splitlines()[0]
        return SurveyedModel(name, kind, "refused", f"fails while it is trained: {text}")
    facts = backbone.facts
    why = sorted({why for why in (facts.loss_alone, facts.score_alone) if why})
    return SurveyedModel(name, kind, "one by one" if why else "vectorised", ", ".join(why), SAMPLES[facts.samples],
                   tuple(p.name for p in backbone.parameters if p.private))


def survey(names: Iterable[str] | None = None) -> list[SurveyedModel]:
    """Try some models, or all."""
    stream = growing_stream(blocks=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operations are tiny
    try:
        return [try_model(name, stream) for name in (models.names() if names is None else names)]
    finally:
        torch.set_num_threads(threads)


_HEAD = """# RecBole's models as backbones

Made by `python run_bench.py list recbole --out results/pages/recbole-models.md`: every general and sequential
recommender of RecBole {version}, tried on two made-up blocks with its own hyper-parameters. How it works:
[plugins.md](../../docs/plugins.md).

- **vectorised**: many clients are trained at once by `torch.func.vmap`.
- **one by one**: an operator that vmap does not take, or Python code that looks at numbers, is in the way; the numbers
  are the same, a round takes longer.
- **refused**: the model cannot be trained at clients that see only their own interactions, or keeps state outside its
  parameters.
- **by domains**: whether domains of many users can train a sequential model, by RecBole's own loss in mini-batches
  ([domain_methods.md](../../docs/domain_methods.md#recboles-own-models)).

{counts}

| model | kind | as a backbone | a sample of its loss | private | by domains |
|---|---|---|---|---|---|
"""


def markdown(surveyed: Iterable[SurveyedModel]) -> str:
    """The page ``results/pages/recbole-models.md``, from what ``survey`` says."""
    import recbole

    surveyed = list(surveyed)
    count = {status: sum(model.status == status for model in surveyed)
             for status in ("vectorised", "one by one", "refused")}
    usable = {kind: sum(model.kind == kind and model.status != "refused" for model in surveyed)
              for kind in ("general", "sequential")}
    counts = (f"{usable['general']} general and {usable['sequential']} sequential models can be used: "
              f"{count['vectorised']} vectorised, {count['one by one']} one by one. {count['refused']} are refused.\n"
              f"Domains can train {sum(model.domains.startswith('yes') for model in surveyed)} sequential models.")
    lines = [f"| {model.name} | {model.kind} | {model.status}{': ' + model.why if model.why else ''} | "
             f"{model.samples} | {', '.join(f'`{name}`' for name in model.private)} | {model.domains} |"
             for model in surveyed]
    return _HEAD.format(version=recbole.__version__, counts=counts) + "\n".join(lines) + "\n"
