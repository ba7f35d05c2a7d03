# SPDX-License-Identifier: Apache-2.0
"""What an operator costs: class of work, results on fakes, saves, and scratch memory."""
