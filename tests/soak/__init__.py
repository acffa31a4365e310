"""Long runs: processes use locks in every way while their store and they themselves are harmed.

``python -m tests.soak --store redis --minutes 10``; ``make soak`` runs all stores.
"""
