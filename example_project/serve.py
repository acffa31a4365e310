"""``make serve``: the shop, until Ctrl-C. ``PORT`` in the environment chooses the port."""

import os
import sys

from .server import HOST, open_shop


def main() -> int:
    with open_shop(int(os.environ.get("PORT") or 0)) as shop:
        print(f"The shop: http://{HOST}:{shop.port}/")
        print(f"The admin: http://{HOST}:{shop.port}/admin/")
        print(f"Its locks: SHOP_LOCKS={os.environ['SHOP_LOCKS']}")
        print("Ctrl-C closes the shop.", flush=True)
        return shop.gunicorn.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nThe shop is closed.")
    except OSError as error:
        sys.exit(f"The shop cannot open: {error}")
