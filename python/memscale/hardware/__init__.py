# SPDX-License-Identifier: Apache-2.0
"""The hardware: this host, a card, their rates, and the allocator's settings."""
