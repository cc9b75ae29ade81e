"""All requests on their way through vLLM."""

from collections.abc import Iterator

from headway.inference.engine import RequestError
from headway.inference.vllm.flight import Flight


class Flights:
    """By their ids. `sequences` counts those that were asked for and have not ended."""

    def __init__(self) -> None:
        self.sequences = 0
        self._by_id: dict[str, Flight] = {}

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Flight | None:
        return self._by_id.get(request_id)

    def add(self, flight: Flight) -> None:
        """Raises RequestError where its id is taken."""
        if flight.request_id in self._by_id:
            raise RequestError(f"request id {flight.request_id!r} is already in flight", "request_id")
        self._by_id[flight.request_id] = flight
        self.sequences += flight.sequences

    def remove(self, flight: Flight) -> None:
        del self._by_id[flight.request_id]
        self.sequences -= flight.sequences
