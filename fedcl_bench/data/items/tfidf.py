"""Vectors of texts that need no language model: hashed TF-IDF, smoothed by a truncated SVD.

A word's direction is a hash of the word, so vectors of different domains share one space although no domain sees
another's texts. A domain's own singular vectors have axes of its own; so rows are projected on these and stay where the
words point (Deerwester et al. 1990 for the SVD, Halko et al. 2011 for how it is computed, Achlioptas 2003 for random
signs as directions).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Sequence

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_LEFT = 1e-6  # a row this short is rounding: the text's words are in no other text, so it keeps what these point to
_MORE = 16  # dimensions of the subspace in which the singular vectors are sought, beyond their number
_ITERATIONS = 4  # of subspaces; singular values of texts fall slowly


def encode(texts: Sequence[str], dim: int, fitted: int | None = None) -> np.ndarray:
    """Vectors of length 1, of zeros for a text without words: float32 of shape (texts, 1, dim).

    With X of (1 + log tf) (1 + log((1 + N) / (1 + df))) in rows of length 1, R random signs and U, S, V the first
    ``dim`` singular vectors and values of X, they are the rows of U U^T X R.

    Args:
        fitted: words, their weights and U, S, V are those of so many texts, the first ones; None: of all. A later text
            x is x V V^T R, as the others are, too.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    fitted = len(texts) if fitted is None else fitted
    vectorizer = TfidfVectorizer(token_pattern=r"[^\W_]+", sublinear_tf=True)
    try:
        vectorizer.fit(texts[:fitted])
    except ValueError:  # no words
        return np.zeros((len(texts), 1, dim), np.float32)
    weights, vocabulary = vectorizer.transform(texts), vectorizer.get_feature_names_out().tolist()
    pointing, first = weights @ _directions(vocabulary, dim), weights[:fitted]
    basis = _left_singular_vectors(first, first @ _directions(vocabulary, dim + _MORE), dim)
    coefficients = basis.T @ pointing[:fitted]
    vectors = basis @ coefficients
    if fitted < len(texts):  # V V^T R = B^T S^-2 U^T X R, with B = U^T X = S V^T
        across = first.T @ basis
        squares = np.square(across).sum(0)
        kept = squares > _LEFT * squares.max()
        later = (weights[fitted:] @ across[:, kept] / squares[kept]) @ coefficients[kept]
        vectors = np.concatenate([vectors, later])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = np.where(lengths > _LEFT, vectors, pointing)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)[:, None]


def _left_singular_vectors(matrix: csr_matrix, start: np.ndarray, count: int) -> np.ndarray:
    """The first ones of a matrix, or as many as it has rows, by iterations of a subspace from ``start``."""
    basis = np.linalg.qr(start)[0]
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(matrix @ (matrix.T @ basis))[0]
    across = matrix.T @ basis
    return basis @ np.linalg.eigh(across.T @ across)[1][:, ::-1][:, :count]


def _directions(vocabulary: Sequence[str], dim: int) -> np.ndarray:
    """Of each word a vector of length 1 whose signs are a hash of the word, (words, dim)."""
    bits = b"".join(hashlib.shake_256(word.encode()).digest(-(-dim // 8)) for word in vocabulary)
    signs = np.unpackbits(np.frombuffer(bits, np.uint8).reshape(len(vocabulary), -1), axis=1)[:, :dim]
    return (2.0 * signs - 1.0) / np.sqrt(dim)
