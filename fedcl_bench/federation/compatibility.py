"""Which backbones, methods and streams go together: asked of what they declare, never of their names."""

from __future__ import annotations

from dataclasses import dataclass

from ..plugin.backbone import Backbone
from ..plugin.silo import DomainMethod, ModuleBackbone
from ..core.errors import Incompatible, UserError
from ..data.stream import Stream
from ..plugin.local_settings import LocalSettings
from ..plugin.method import HOOKS, Method, does_something
from ..plugin.sequential import SequentialBackbone, SessionBackbone
from .settings import FederationSettings

_SESSIONS = "a stream of sessions (--set stream=sessions, or --dataset xing)"


@dataclass(frozen=True)
class StreamKind:
    """What must be known of a stream to tell what goes with it: of domains or sessions, whether users are known to be
    the same in several domains, and whether there are features of items."""

    domains: bool
    sessions: bool
    known: bool
    features: bool

    @classmethod
    def of(cls, stream: Stream) -> StreamKind:
        return cls(bool(stream.domains), bool(stream.steps[0].sessions), bool(stream.known),
                   stream.item_features is not None)


def check(backbone: Backbone, method: Method, stream: StreamKind, topology: str, local: LocalSettings,
          server: FederationSettings) -> None:
    """Raise UserError unless a run's backbone, method and stream go together."""
    domains = stream.domains
    modules = isinstance(backbone, ModuleBackbone), isinstance(method, DomainMethod)
    if any(modules) and domains:
        _check_modules(backbone, method, topology)
    elif any(modules):
        kind, plugin = ("backbone", backbone) if modules[0] else ("method", method)
        of_domains = ModuleBackbone if modules[0] else DomainMethod
        raise Incompatible(f"{kind} '{plugin.name}' is one of domains; name two or more, as in --dataset A+B.", kind,
                           lambda cls: not issubclass(cls, of_domains))
    elif domains or topology == "central":
        _check_in_epochs(backbone, method, domains)
    else:
        _check_users(backbone, method, stream.sessions, local, server)
    if stream.known:
        _check_known_users(backbone)
    if not stream.features:
        _check_features(backbone, method)


def _check_features(backbone: Backbone, method: Method) -> None:
    for plugin in (backbone, method):
        if plugin.needs_features and not isinstance(plugin, ModuleBackbone):
            raise Incompatible(f"{plugin.kind} '{plugin.name}' reads features of items, which are not there: it takes "
                               f"one dataset with a .item file and clients of one user each.", plugin.kind,
                               lambda cls: not cls.needs_features)


def _check_users(backbone: Backbone, method: Method, sessions: bool, local: LocalSettings, server: FederationSettings
                 ) -> None:
    sequential, init = isinstance(backbone, SequentialBackbone), server.init
    if sequential and not sessions:
        raise UserError(f"backbone '{backbone.name}' is sequential and needs {_SESSIONS}.")
    _check_method(backbone, method, sequential, sessions)
    if sequential and local.negatives != 1:
        raise UserError(f"setting 'negatives': found {local.negatives}, accepted: 1 with a sequential backbone, "
                        f"which has one per target.")
    if sessions and backbone.own_samples(local) is not None:
        raise Incompatible(f"backbone '{backbone.name}' trains on blocks or the static stream; use --set "
                           f"stream=blocks, or a sequential backbone with sessions.", "backbone", _is_sequential)
    _check_own_terms(backbone, sequential or backbone.own_samples(local) is not None, sequential)
    if init == "per_client" and not sequential:
        raise UserError(f"setting 'init': found per_client, accepted: server with '{backbone.name}'; only sequential "
                        f"backbones can start at the clients.")
    if local.optimiser not in method.optimisers:
        raise UserError(f"setting 'optimiser': found {local.optimiser}, accepted: {', '.join(method.optimisers)} with "
                        f"method '{method.name}'.")
    for hook in ("row_basis", "gradient_correction") if sequential else ():
        if method.overrides(hook):
            raise Incompatible(f"method '{method.name}' has {hook}(), which sequential backbones such as "
                               f"'{backbone.name}' do not ask.", "backbone", lambda cls: not _is_sequential(cls))
    if method.overrides("gradient_correction") and not method.sees_rows:
        raise UserError(f"method '{method.name}' has gradient_correction(), for which clients must hold copies of "
                        f"their item rows; expected sees_rows = True in the class.")
    if method.overrides("aggregate_updates"):
        check_single_updates(backbone, f"method '{method.name}'", init)
    if method.overrides("sums"):
        _check_sums(backbone, method, init)
    if server.fold_in and server.cold_start == "mean" and backbone.factor_names is None:
        made = f"method '{method.name}' on " if method.overrides("trained_backbone") else ""
        error = (f"setting 'cold_start': found mean, accepted: fold_in or popularity with {made}'{backbone.name}', "
                 f"whose scores are no inner products of items' public vectors and one of the user.")
        raise UserError(error) if made else Incompatible(error, "backbone", lambda cls: cls.factor_names is not None)


def _check_own_terms(backbone: Backbone, makes_loss: bool, sequential: bool) -> None:
    """Raise UserError if a backbone declares what nobody asks of it. ``makes_loss``: it makes its whole loss itself."""
    if makes_loss and backbone.overrides("regulariser"):
        raise UserError(f"backbone '{backbone.name}' has regulariser(), which is not asked of sequential backbones and "
                        f"of those with own_loss(); add the term to the loss there.")
    if backbone.weight_decay and (sequential or not backbone.whole_tables):
        raise UserError(f"backbone '{backbone.name}' has weight_decay, which needs whole_tables = True and a backbone "
                        f"that is not sequential.")


def check_single_updates(backbone: Backbone, what: str, init: str) -> None:
    """Raise UserError unless each client's upload is a change of what the server sent, and the server averages;
    ``what``: looks at each."""
    if init == "per_client":
        raise UserError(f"setting 'init': found per_client, accepted: server with {what}, whose server looks at each "
                        f"client's change of what it was sent.")
    if backbone.overrides("serve"):
        raise Incompatible(f"{what} needs a server that adds up clients' changes, and that of '{backbone.name}' does "
                           f"more.", "backbone", lambda cls: cls.serve is Backbone.serve)


def check_ratings(backbone: str, method: type[Method]) -> None:
    """Raise UserError unless a method goes with a backbone, by its name, that predicts ratings."""
    def goes(cls: type[Method]) -> bool:
        return not (cls.adds_scores() or cls.reads_logits)

    if not goes(method):
        raise Incompatible(f"method '{method.name}' takes scores for logits, and '{backbone}' predicts ratings with "
                           f"these settings.", "method", lambda cls: cls.needs_backbone and goes(cls))


def _check_sums(backbone: Backbone, method: Method, init: str) -> None:
    """Raise UserError unless clients can send something else than their changes of what the server sent."""
    if init == "per_client":
        raise UserError(f"setting 'init': found per_client, accepted: server with method '{method.name}', whose "
                        f"clients send what training adds to what they were sent.")
    if backbone.keeps_local_tables or backbone.serves_tables:
        raise Incompatible(f"method '{method.name}' sends sums in place of item tables, and clients of "
                           f"'{backbone.name}' keep or send theirs.", "backbone",
                           lambda cls: not (cls.keeps_local_tables or cls.serves_tables))
    if method.penalises_rows or method.overrides("aggregate_updates"):
        raise UserError(f"method '{method.name}' sends sums in place of changes, so that it can have none of "
                        f"row_penalty(), pull() and aggregate_updates().")
    if not method.overrides("aggregate_sums"):
        raise UserError(f"method '{method.name}' declares sums() and has no aggregate_sums(), which makes changes of "
                        f"public parameters of them.")
    method.sums(backbone, 1)  # may raise one


def is_plain_mean(backbone: Backbone, method: Method) -> bool:
    """Whether all domains receive the mean of their uploads, after every round of the run."""
    of_method = isinstance(method, DomainMethod) and (
        type(method).aggregate is not DomainMethod.aggregate or type(method).upload is not DomainMethod.upload
        or len(method.stages()) > 1)
    return not of_method and len(backbone.stages() if isinstance(backbone, ModuleBackbone) else ()) <= 1


def has_shared_rows(backbone: Backbone | type[Backbone]) -> bool:
    """Whether all that depends on an item are rows of public tables, which only clients that look it up change."""
    return not (isinstance(backbone, ModuleBackbone) or backbone.for_domains or backbone.whole_tables
                or backbone.scores_local_tables or backbone.serves_tables
                or isinstance(backbone, Backbone) and backbone.new_personal(0, range(0)))


def _check_in_epochs(backbone: Backbone, method: Method, domains: bool) -> None:
    """Raise UserError unless they go with clients that train on mini-batches of many users' sequences: domains, or one
    that holds all sessions."""
    if not _is_sequential(type(backbone)):
        said = (f"backbone '{backbone.name}' is not sequential, and domains are sequences of items of many users"
                if domains else f"setting 'topology': found central, accepted: federated with backbone "
                                f"'{backbone.name}', which is not sequential")
        raise Incompatible(f"{said}.", "backbone", _is_sequential)
    if does_something(method) and not (domains and method.topology):
        said = ("clients of one user each, and here each is a domain of many" if domains else
                "many clients, and with topology=central one holds all sessions")
        raise Incompatible(f"method '{method.name}' is about {said}.", "method", lambda cls: not does_something(cls))
    if backbone.new_personal(0, range(0)):
        raise UserError(f"setting 'output_embedding': found private, accepted: tied with "
                        f"{'stream=domains' if domains else 'topology=central'}, whose clients hold many users.")
    if isinstance(backbone, SessionBackbone) and not backbone.whole_tables:
        raise UserError(f"setting 'loss': found {backbone.settings.loss}, accepted: cross_entropy with "
                        f"{'stream=domains' if domains else 'topology=central'}, as in the papers of "
                        f"{'cross-domain' if domains else 'session'} recommenders.")


def check_classes(backbone: type, method: type) -> None:
    """Raise UserError if of a backbone and a method one is for domains, and the other cannot go with it. It is asked
    before their settings are looked at, of which two of one name need not go together then."""
    if issubclass(method, DomainMethod):
        needs = method.needs
        if not issubclass(backbone, ModuleBackbone) or (needs and needs not in backbone.exchanges):
            what = f"exchanges {needs}" if needs else "is about modules of domains"
            raise Incompatible(f"method '{method.name}' {what}, which '{backbone.name}' has none of.", "backbone",
                               lambda cls: issubclass(cls, ModuleBackbone) and (not needs or needs in cls.exchanges))
    elif issubclass(backbone, ModuleBackbone) and does_something(method) and not method.topology:
        raise Incompatible(f"method '{method.name}' is about clients of one user each, and '{backbone.name}' is for "
                           f"domains of many.", "method",
                           lambda cls: not does_something(cls) or issubclass(cls, DomainMethod))


def _check_modules(backbone: Backbone, method: Method, topology: str) -> None:
    check_classes(type(backbone), type(method))
    if isinstance(method, DomainMethod) and method.needs and method.needs not in backbone.exchanges:
        raise UserError(f"method '{method.name}' exchanges {method.needs}, which '{backbone.name}' has none of "
                        f"with these settings (see: list {backbone.name}).")
    for kind, plugin in (("method", method), ("backbone", backbone)):
        accepted = getattr(plugin, "topologies", None)
        if accepted and topology not in accepted:
            raise UserError(f"setting 'topology': found {topology}, accepted: {', '.join(accepted)} with {kind} "
                            f"'{plugin.name}'.")


def _check_known_users(backbone: Backbone) -> None:
    """Raise UserError unless it makes something of who the domains' users are."""
    def uses(cls: type) -> bool:
        return issubclass(cls, ModuleBackbone) and cls.uses_known_users

    if not uses(type(backbone)):
        raise Incompatible(f"setting 'known_users': found true, accepted: false with '{backbone.name}', which makes "
                           f"nothing of who the users are.", "backbone", uses)


def goes_with(stream: Stream, cls: type) -> bool:
    """Whether a plugin, a backbone or a method, is for a stream of this kind."""
    if stream.domains:
        return cls.for_domains or not issubclass(cls, Backbone) or _is_sequential(cls)
    sequential = _is_sequential(cls) or issubclass(cls, Method) and cls.needs_sequential
    return not cls.for_domains and (bool(stream.steps[0].sessions) or not sequential)


def _is_sequential(cls: type) -> bool:
    return issubclass(cls, SequentialBackbone)


def _reads_representations(cls: type[Method]) -> bool:
    """Whether a method may work on what a sequential backbone makes of each position."""
    return (bool(cls.needs_sequential) or cls.trains != "clients" or cls.represent is not Method.represent
            or cls.replayed_sessions is not Method.replayed_sessions)


def _is_server_s(cls: type[Method]) -> bool:
    """Whether a method does no more than aggregate clients' updates, whatever these train."""
    others = [hook for hook in HOOKS if not hook.startswith("aggregate")]
    return (cls.aggregate_updates is not Method.aggregate_updates and cls.trains == "clients" and not cls.history
            and all(getattr(cls, hook) is getattr(Method, hook) for hook in others))


def _check_method(backbone: Backbone, method: Method, sequential: bool, sessions: bool) -> None:
    """Raise UserError unless the method can act on this backbone and stream. One that does nothing always can."""
    def acts_on_sessions(cls: type) -> bool:
        whole = sequential and not backbone.inner_products and _reads_representations(cls)
        acts = cls.first_step == 0 or sequential and cls.acts_in_sessions
        return not (does_something(cls) or cls.topology) or (
            acts and (_is_server_s(cls) or cls.needs_sequential in (None, sequential) and not whole))

    if (method.needs_sequential or method.uploads_first) and not sequential:
        raise Incompatible(f"method '{method.name}' needs a sequential backbone with {_SESSIONS}; found "
                           f"'{backbone.name}'.",
                           "backbone", lambda cls: _is_sequential(cls) and cls.inner_products)
    if not (sessions or method.needs_backbone or method.overrides("rescore")):
        raise UserError(f"method '{method.name}' continues sessions and needs {_SESSIONS}.")
    if sequential and method.topology == "local":
        raise Incompatible(f"method '{method.name}' would hold a whole item table of '{backbone.name}' for every "
                           f"client.", "method", acts_on_sessions)
    if not does_something(method):
        return
    aggregates = _is_server_s(type(method))
    if sequential and method.needs_sequential is False and not aggregates:
        raise Incompatible(f"method '{method.name}' works on scores of item lists, which the sequential backbone "
                           f"'{backbone.name}' has none of.", "method", acts_on_sessions)
    if sessions and method.first_step > 0 and not (sequential and method.acts_in_sessions):
        raise Incompatible(f"method '{method.name}' acts from a stream's second step on, and a stream of sessions "
                           f"has one; use another method with '{backbone.name}', or --set stream=blocks.", "method",
                           acts_on_sessions)
    if aggregates:
        return
    if sequential and not backbone.inner_products and _reads_representations(type(method)):
        raise Incompatible(f"method '{method.name}' works on representations that scores are inner products with; "
                           f"those of '{backbone.name}' are none.", "method", acts_on_sessions)
    if not sequential and not backbone.whole_tables and backbone.new_personal(0, range(0)):
        raise Incompatible(f"method '{method.name}' needs whole personal tables, of which '{backbone.name}' with its "
                           f"present settings trains single rows (see: list {backbone.name}).", "method",
                           lambda cls: not does_something(cls))
