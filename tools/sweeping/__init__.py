# SPDX-License-Identifier: Apache-2.0
"""Sweeps over model classes of public libraries and over what training loops do around models.

subject     what a library has to say: names, recipes, a model with its batches
trial       one model: plain twice in one process, MemScale first in another; what is compared
digests     bits as text: loss, gradients, buffers, states of random generators
remains     what planning or a wrapped step left behind: attributes, hooks, fakes, settings of the process
objects     every tensor that Python holds
peaks       measured peak of tensor bytes
forks       a fresh process per trial: forked from one that has only imported, or started anew
rows        one row per model, in a file of JSON lines
driver      runs all, keeps what is there
page        docs/guide/coverage.md
packages    libraries that only the sweep needs
libraries/  one module per library
"""
