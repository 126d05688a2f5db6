"""FCUCR: time-aware self-distillation at the client, prototypes of similar users' sessions through the server.

Each formula stands where it is computed, with the setting that chooses between the paper's and the released code's.
"Alg. 1" is the paper's algorithm; the server's lines 4-9 in it are the transfer of prototypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu

from fedcl_bench import Dropout, Method, Start, in_order, linear_start, norm_start, rng, setting, zeros
from fedcl_bench.toolbox.layers import apply_linear
from fedcl_bench.toolbox.prototypes import DELTA, fuse, gaussian_epsilon, nearest

BN_EPS, BN_MOMENTUM = 1e-9, 0.1  # of Dice's batch normalisation
_ANSWERED_AT_ONCE = 256  # queries that one thread answers together
_FUSED_AT_ONCE = 32  # queries; bounds the memory of their k prototypes


@dataclass(frozen=True)
class FCUCRSettings:
    lambda_tasd: float = setting(10.0, "lambda: weight of the self-distillation loss; with distillation=capped the "
                                 "most it can be", low=0.0, search=(0.1, 1.0, 5.0, 10.0, 20.0, 50.0),
                                 only_if="without!=tasd|both")
    distillation: str = setting("capped", "the weight is the smaller of lambda and L_rec / L_dist (released code), or "
                                "lambda (paper)", choices=("capped", "fixed"), only_if="without!=tasd|both")
    teacher: str = setting("broadcast", "the encoder that a client distils from: the one it has just received (what "
                           "the released code comes to), or its own after its previous round (paper)",
                           choices=("broadcast", "previous"), only_if="without!=tasd|both")
    neighbours: int = setting(20, "k: the most similar prototypes that are fused", low=1,
                              search=(1, 5, 20, 100, 200, 1000), only_if="without!=iupr|both")
    transfer: str = setting("after", "prototypes are made after local training, and the fused one, asked for with the "
                            "next session, is used in the next round (released code); or before it, with the module "
                            "just received, and used in the same round (paper, Alg. 1)", choices=("after", "before"),
                            only_if="without!=iupr|both")
    prototype: str = setting("positions", "h of a session: its representations at all positions (released code), or "
                             "one vector, their mean over its items (paper: a single session-level representation)",
                             choices=("positions", "mean"), only_if="without!=iupr|both")
    revisited: str = setting("replaced", "a prototype of a session whose earlier one is in the knowledge base replaces "
                             "that (released code), or is added (paper, Eq. 4)", choices=("replaced", "added"),
                             only_if="without!=iupr|both")
    fusion: str = setting("softmax", "of those prototypes: weighted by a softmax over their similarities (released "
                          "code), their mean (paper), or the mean of their projections onto their first "
                          "principal direction",
                          choices=("softmax", "mean", "pca"), only_if="without!=iupr|both")
    window: int = setting(0, "rounds whose prototypes the knowledge base keeps; 0: all (Table 4)", low=0,
                          only_if="without!=iupr|both")
    window_rule: str = setting("rounds", "prototypes older than `window` rounds leave (paper), or the first inserted "
                               "when there are more than `window` times the participants (released code, "
                               "where these are all clients)",
                               choices=("rounds", "entries"), only_if="without!=iupr|both")
    transfer_interval: int = setting(1, "prototypes are transferred every so many rounds (Table 5)", low=1,
                                     only_if="without!=iupr|both")
    head_size: int = setting(80, "hidden size of the private prediction module", low=1)
    prototype_noise: float = setting(0.0, "standard deviation of Gaussian noise on the prototype a client receives, "
                                     "anew in every local batch and evaluation (released code)", low=0.0,
                                     only_if="without!=iupr|both")
    without: str = setting("none", "ablation of Table 3: tasd = no self-distillation, iupr = no prototypes (zeros in "
                           "their place), both = the backbone with the private prediction module alone",
                           choices=("none", "tasd", "iupr", "both"))


class Dice(torch.autograd.Function):
    """p x + (1 - p) alpha x with p = sigmoid(weight centred / sqrt(var + eps) + bias), (C, L, h). Args of ``apply``: x;
    weight, bias, alpha, each (C, h); centred, (C, L, h); var, (C, 1, h); whether x is centred by its own mean over L
    and var its own variance, through which a gradient comes too (``by_itself``). It takes half the passes over x that
    autograd takes."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor, centred: Tensor, var: Tensor,
                by_itself: bool) -> Tensor:
        weight, bias, alpha = (of_all.unsqueeze(1) for of_all in (weight, bias, alpha))
        scale = (var + BN_EPS).rsqrt_()
        normed = centred * scale
        p = torch.addcmul(bias, normed, weight).sigmoid_()
        factor = torch.addcmul(alpha, p, 1.0 - alpha)
        ctx.save_for_backward(x, normed, p, factor, scale, weight, alpha)
        ctx.by_itself = by_itself
        return x * factor

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, normed, p, factor, scale, weight, alpha = ctx.saved_tensors
        rest = 1.0 - p
        of_factor = gradient * x
        of_alpha = torch.linalg.vecdot(of_factor, rest, dim=1)
        inner = of_factor.mul_(p).mul_(rest).mul_(1.0 - alpha)  # gradient of the sigmoid's argument
        of_weight, of_bias = torch.linalg.vecdot(inner, normed, dim=1), inner.sum(1)
        if ctx.by_itself:  # the gradient of the normalised x loses its parts along 1 and along itself
            share = -1.0 / x.shape[1]
            inner.add_(of_bias.unsqueeze(1), alpha=share).addcmul_(normed, of_weight.unsqueeze(1), value=share)
        of_x = (gradient * factor).addcmul_(inner, scale * weight)
        return of_x, of_weight, of_bias, of_alpha, None, None, None


class FCUCR(Method):
    """L = L_rec + w L_dist with L_dist = MSE(H, H_teacher) and logits <psi([H ; rho]), q_i>.

    H are the encoder's representations of the session, psi is private to each client: a linear layer, Dice with batch
    normalisation over the session's positions, a linear layer. Of one representation of the session as a whole, which
    has no positions to normalise over, it is the article's: a linear layer, GELU, dropout. q_i is item i's public row,
    or a private one, with which psi ends in all items (``output_embedding``). The logits are Eq. 7, the loss is Eq. 8,
    in which the server's mean has the weights alpha_u of Eq. 1 (``weighting``). With zeros for rho they are Eq. 2 and
    Eq. 1.

    - transfer=before (Alg. 1, server's lines 4-9): with the module that it has just received a client makes h of its
      session and uploads it; the server answers with rho, fused from the k nearest of other clients, for this round.
    - transfer=after (released code): after its round a client uploads h of the session, and h of its next session as a
      query; the server answers with rho for the next round.
    """

    name = "fcucr"
    numbers = 1
    title = "time-aware self-distillation and inter-user prototype transfer, for sessions"
    reference = ("Zhang et al., Learning Evolving Preferences: A Federated Continual Framework for User-Centric "
                 "Recommendation, WWW 2026, arXiv 2603.17315")
    Settings = FCUCRSettings
    ambiguities = {"init": {"per_client": "released code", "server": "paper, Algorithm 1"},
                "distillation": {"capped": "released code", "fixed": "paper"},
                "teacher": {"broadcast": "released code", "previous": "paper"},
                "transfer": {"after": "released code", "before": "paper"},
                "prototype": {"positions": "released code", "mean": "paper"},
                "revisited": {"replaced": "released code", "added": "paper"},
                "fusion": {"softmax": "released code", "mean": "paper"},
                "output_embedding": {"tied": "released code", "private": "Eq. 2 over the item set; the article"},
                "weighting": {"uniform": "released code", "interactions": "paper"},
                "patience": {5: "paper", 0: "released code"},
                "candidate_draw": {"once": "the same for all", "redraw": "released code"}}
    first_step = 0
    encodes_next_session = True
    needs_sequential = True

    def __init__(self, settings):
        super().__init__(settings)
        self.distils = settings.without not in ("tasd", "both") and settings.lambda_tasd > 0.0
        self.transfers = settings.without not in ("iupr", "both")
        self.uploads_first = self.transfers and settings.transfer == "before"
        asks_next = self.transfers and not self.uploads_first
        self.query_dropout = asks_next if self.transfers else None
        self.encodes_next_session = asks_next or (self.distils and settings.teacher == "previous")

    def uploads(self, backbone, round_):
        if not self.transfers:
            return {}
        positions = backbone.n_vectors if self.settings.prototype == "positions" else 1
        size = (positions * backbone.settings.dim,)
        asks = {"query": size} if self.answers_in(round_) and not self.uploads_first else {}
        return {"prototype": size, "session": (), **asks}

    # The private prediction module psi.

    def starts(self, backbone) -> dict[str, Start]:
        """How psi's parameters start, at every client on its own."""
        dim, hidden = backbone.settings.dim, self.settings.head_size
        if not backbone.positionwise:
            return {f"head.{part}": Start(shape, bound=(2 * dim) ** -0.5)
                    for part, shape in (("weight", (dim, 2 * dim)), ("bias", (dim,)))}
        return {**linear_start("head.0", 2 * dim, hidden), **norm_start("head.norm", hidden),
                "head.alpha": zeros(hidden), **linear_start("head.1", hidden, dim)}

    def new_private(self, seed, users, backbone):
        ids, hidden = torch.arange(users.start, users.stop), self.settings.head_size
        for name, value in (("head.norm.mean", 0.0), ("head.norm.var", 1.0)) if backbone.positionwise else ():
            self.client_state[name] = torch.full((users.stop, hidden), value, dtype=torch.float64)
        return {name: start.draw(rng.client_keys(rng.key(seed, f"init {name}"), ids))
                for name, start in self.starts(backbone).items()}

    def dice(self, encoding, x: Tensor) -> Tensor:
        """p x + (1 - p) alpha x with p = sigmoid(BatchNorm(x)), over the positions of one session, padding included."""
        state, users = self.client_state, encoding.users
        layer = [encoding.clients[f"head.{name}"] for name in ("norm.weight", "norm.bias", "alpha")]
        if encoding.purpose != "train":
            mean, var = (state[name][users].unsqueeze(1).to(x) for name in ("head.norm.mean", "head.norm.var"))
            return Dice.apply(x, *layer, x - mean, var, False)
        with torch.no_grad():
            mean = x.mean(1, keepdim=True)
            centred = x - mean
            var = centred.square().mean(1, keepdim=True)
            unbiased = var * (x.shape[1] / max(x.shape[1] - 1, 1))
            for name, now in (("head.norm.mean", mean), ("head.norm.var", unbiased)):
                moved = torch.lerp(state[name][users], now.squeeze(1).to(state[name]), BN_MOMENTUM)
                state[name].index_copy_(0, users, moved)
        return Dice.apply(x, *layer, centred, var, True)

    def represent(self, encoding):
        """psi([H ; rho]) = W_1 Dice(W_0 [H ; rho] + b_0) + b_1 at every position (Eq. 7), (C, L, d); of the session as
        a whole GELU(W [H ; rho] + b) with dropout, (C, 1, d)."""
        if "head.weight" in encoding.clients:
            hidden = gelu(apply_linear(encoding.clients, "head", encoding.features, self.received(encoding)))
            if encoding.purpose == "train":
                drop = Dropout(encoding.draw.clients("dropout of psi", encoding.users))
                hidden = drop(hidden, self.dropout)
            return hidden
        hidden = apply_linear(encoding.clients, "head.0", encoding.features, self.received(encoding))
        return apply_linear(encoding.clients, "head.1", self.dice(encoding, hidden))

    # Inter-user prototype transfer.

    def prototype(self, features: Tensor, real: Tensor) -> Tensor:
        """h of sessions with representations (C, L, d): these themselves, (C, L d), or their mean over the positions
        that stand for an item (real), (C, d). Of one representation of the session, (C, 1, d), it is that."""
        if self.settings.prototype == "positions" or features.shape[1] == 1:
            return features.flatten(1)
        real = real.unsqueeze(2)
        return (features * real).sum(1) / real.sum(1).clamp(min=1)

    @torch.no_grad()
    def received(self, encoding) -> Tensor:
        """rho of each client, (C, L, d): in training what the server sent; in an evaluation the answer to its query."""
        features = encoding.features
        training = encoding.purpose == "train"
        if not self.transfers or training and "prototype" not in self.client_state:
            return torch.zeros_like(features)
        if training:
            rho = self.client_state["prototype"][encoding.users]
        else:
            rho = encoding.ask(self.prototype(encoding.queries, encoding.real))
        if self.settings.prototype_noise > 0.0:
            keys = encoding.draw.clients(f"prototype noise of {encoding.purpose}", encoding.users)
            noise = rng.normals(keys[:, None], torch.arange(rho.shape[1], device=rho.device))
            rho = rho + self.settings.prototype_noise * noise.to(rho)
        return rho.view(len(rho), -1, features.shape[2]).expand_as(features)

    def answer_queries(self, queries, users):
        """Server: rho of each query in an evaluation, which has threads of its own; zeros before the first round."""
        return self.answer(queries, users) if self.server_state else torch.zeros_like(queries)

    @torch.no_grad()
    def answer(self, queries: Tensor, users: Tensor) -> Tensor:
        """The server's answers to queries: the fused nearest prototypes of other clients, each as long as a query. The
        nearest are the k of largest cosine similarity to the query, of other clients than its own (Eq. 5). They are
        fused (Eq. 6) to sum_j softmax_j(similarity) prototype_j (released code: fusion=softmax) or their mean (paper:
        fusion=mean)."""
        base, lengths, owner = (self.server_state[name] for name in ("prototypes", "length", "owner"))
        similarity, position = nearest(queries, users, base, lengths, owner, self.settings.neighbours)
        parts = zip(similarity.split(_FUSED_AT_ONCE), position.split(_FUSED_AT_ONCE))
        return torch.cat([fuse(near, embedding(where, base), self.settings.fusion) for near, where in parts])

    def answers(self, queries: Tensor, users: Tensor) -> Tensor:
        """``answer`` to all of a round's clients, on several threads."""
        pieces = list(zip(queries.split(_ANSWERED_AT_ONCE), users.split(_ANSWERED_AT_ONCE)))
        return torch.cat(list(in_order(lambda piece: self.answer(*piece), pieces, queries.device)))

    def begin_round(self, step, round_, backbone):
        self.dropout = backbone.settings.dropout  # which psi has in common with the encoder in the article
        if self.distils and self.settings.teacher == "previous" and round_ == 0:
            shape = step.n_users, backbone.n_vectors, backbone.settings.dim
            device = step.train.values.device
            self.client_state |= {"teacher": torch.zeros(shape, dtype=torch.float64, device=device),
                                  "teacher round": torch.full(shape[:1], -1, device=device)}
        # begin_local and end_local write into these.
        for name in ("head.norm.mean", "head.norm.var", "teacher", "teacher round"):
            if name in self.client_state:
                self.client_state[name] = self.client_state[name].clone()

    def before_training(self, local):
        """Upload the prototype of the session by the module just received (Alg. 1, server's lines 4-6)."""
        local.upload("prototype", self.prototype(local.encode(), local.sequence.real))
        local.upload("session", local.session)

    def end_local(self, local):
        """Upload the session's prototype, by the representations of the last epoch, and one of the next session as a
        query (released code)."""
        if self.transfers and not self.uploads_first:
            local.upload("prototype", self.prototype(local.features.detach(), local.sequence.real))
            local.upload("session", local.session)
            if self.answers_in(local.draw.round):
                local.upload("query", self.prototype(local.encode_next(), local.next_sequence.real))
        if self.distils and self.settings.teacher == "previous":
            following = local.encode_next(dropout=False)
            self.client_state["teacher"].index_copy_(0, local.users, following.to(self.client_state["teacher"]))
            self.client_state["teacher round"][local.users] = local.draw.round

    @torch.no_grad()
    def end_round(self, round_, users, uploads):
        """Server: prototypes enter the knowledge base (Eq. 4), then every query is answered with rho. Before training a
        client's prototype is its query."""
        if not self.transfers:
            return {}
        self.remember(uploads["prototype"], users, uploads["session"], round_)
        query = uploads["prototype" if self.uploads_first else "query"] if self.answers_in(round_) else None
        return {} if query is None else {"prototype": self.answers(query, users)}

    def answers_in(self, round_: int) -> bool:
        """Whether clients ask for a prototype at the end of a round (Table 5 varies the interval)."""
        return round_ % self.settings.transfer_interval == 0

    def remember(self, uploads: Tensor, users: Tensor, sessions: Tensor, round_: int) -> None:
        """Put a round's prototypes (C, n) into the knowledge base (Eq. 4); of a session that has one there already it
        replaces that (released code: revisited=replaced) or is added (paper: revisited=added). Of a window of r rounds
        (Table 4) those remain that are younger than r rounds (paper: window_rule=rounds), or the latest r times the
        participants to be inserted first (released code: window_rule=entries)."""
        state, s = self.server_state, self.settings
        whose = (users << 32) + sessions  # clients number their sessions from 0
        new = {"prototypes": uploads, "length": uploads.norm(dim=1), "owner": users, "session": whose,
               "round": torch.full_like(users, round_)}
        base = state or {name: values[:0] for name, values in new.items()}
        again = torch.isin(whose, base["session"]) & (s.revisited == "replaced")
        known, order = base["session"].sort()
        row = order[torch.searchsorted(known, whose[again])]
        for name, values in new.items():
            new[name] = torch.cat([base[name], values[~again]]).index_copy_(0, row, values[again])
        if s.window > 0:
            keep = new["round"] > round_ - s.window
            if s.window_rule == "entries":  # entries stand in the order of their first insertion
                size = len(keep)
                keep = torch.arange(size, device=users.device) >= size - s.window * len(users)
            new = {name: values[keep] for name, values in new.items()}
        state.update(new)

    # Time-aware self-distillation.

    @torch.no_grad()
    def begin_local(self, local):
        """H_teacher of the session: by the encoder just received (released code: teacher=broadcast), or by the client's
        own after its previous round, f^(t-1) (paper: teacher=previous). There is none in the first round."""
        if not self.distils or local.draw.round == 0:
            return
        teacher = local.encode()
        if self.settings.teacher == "previous":
            # A client that missed the previous round has no encoder of then, and takes the one it has received.
            present = self.client_state["teacher round"][local.users] == local.draw.round - 1
            before = self.client_state["teacher"][local.users].to(teacher)
            teacher = torch.where(present[:, None, None], before, teacher)
        local.kept["teacher"] = teacher

    def local_loss(self, local):
        """w L_dist of Eq. 8, where L_dist is the mean of (H - H_teacher)^2 over all positions and entries, padding
        included (Eq. 3)."""
        if "teacher" not in local.kept:
            return None
        distance = (local.features - local.kept["teacher"]).square().mean((1, 2))
        return self.weight(local.loss.detach(), distance.detach()) * distance

    def weight(self, recommendation: Tensor, distance: Tensor) -> Tensor | float:
        """The weight w of the self-distillation loss at each client, shape (C,): lambda (paper: distillation=fixed) or
        min(L_rec / (L_dist + 1e-8), lambda), not differentiated (released code: distillation=capped)."""
        if self.settings.distillation == "fixed":
            return self.settings.lambda_tasd
        return (recommendation / (distance + 1e-8)).clamp(max=self.settings.lambda_tasd)

    # What people are told.

    def notes(self, participants):
        s = self.settings
        if self.transfers and s.neighbours > participants - 1:
            yield (f"neighbours={s.neighbours}: after the first round other clients have uploaded {participants - 1} "
                   f"prototypes; as long as there are fewer, all of them are used.")

    def privacy(self):
        s = self.settings
        if self.transfers and s.prototype_noise > 0.0:
            epsilon = gaussian_epsilon(s.prototype_noise, DELTA)
            yield (f"prototype_noise={s.prototype_noise:g}: FCUCR's formula gives epsilon {epsilon:.2f} for delta "
                   f"{DELTA:g}. It takes the sensitivity as 1, and nothing here bounds it: this is no formal "
                   f"guarantee.")
