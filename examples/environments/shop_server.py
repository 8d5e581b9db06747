"""An MCP server with one tool: the price of an item, another one each time.

python shop_server.py speaks over stdin and stdout; python shop_server.py PORT serves http://127.0.0.1:PORT/mcp.
"""

import random
import sys
from typing import Literal

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: Literal["apple", "lime", "pea", "corn"]) -> str:
    """What an item costs now."""
    return str(random.randrange(6))


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
