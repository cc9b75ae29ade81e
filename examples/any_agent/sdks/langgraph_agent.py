"""A calculator by `langgraph` and `langchain-openai`: two nodes, the model and its tools."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


MODEL = ChatOpenAI(model="policy").bind_tools([add])


def ask(state: MessagesState) -> MessagesState:
    return {"messages": [MODEL.invoke(state["messages"])]}


def main() -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = graph.compile().invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
    print(state["messages"][-1].content)


if __name__ == "__main__":
    main()
