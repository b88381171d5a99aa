from nsa.testing.interpreter import quicken
from nsa.testing.judge import addresses
from nsa.testing.machine import current_lane

if current_lane() == "interpreter":
    quicken()
    addresses.watch()
