"""edgeq: large models as one packed low-bit file, and a runtime that runs it on your device."""

import os.path

__version__ = "0.1.0"

# In a checkout runtime/, converters/, targets/ and tools/ lie beside edgeq/, not in it.
if not os.path.isdir(os.path.join(__path__[0], "runtime")):
    __path__.append(os.path.dirname(__path__[0]))
