"""An agent of NeMo-Gym that asks the model several times, with a question of its own between its turns."""

from fastapi import Request, Response
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import (
    NeMoGymEasyInputMessage,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import get_response_json, raise_for_status
from pydantic import ConfigDict


class AskerConfig(BaseResponsesAPIAgentConfig):
    resources_server: ResourcesServerRef
    model_server: ModelServerRef
    num_turns: int


class AskerRequest(BaseRunRequest):
    model_config = ConfigDict(extra="allow")


class AskerVerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class AskerResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class Asker(SimpleResponsesAPIAgent):
    config: AskerConfig

    async def responses(
        self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        said = []
        for turn in range(self.config.num_turns):
            asked = body.model_copy(update={"input": [*body.input, *said]})
            posted = await self.server_client.post(
                server_name=self.config.model_server.name, url_path="/v1/responses", json=asked
            )
            await raise_for_status(posted)
            answer = NeMoGymResponse.model_validate(await get_response_json(posted))
            said += answer.output
            if answer.incomplete_details:
                break
            if turn + 1 < self.config.num_turns:
                said.append(NeMoGymEasyInputMessage(role="user", content=f"again {turn}"))
        answer.output = [item for item in said if not isinstance(item, NeMoGymEasyInputMessage)]
        return answer

    async def run(self, request: Request, body: AskerRequest) -> AskerResponse:
        if "fail" in str(body.responses_create_params.input):
            raise RuntimeError("this agent fails")
        answered = await self.responses(request, Response(), body.responses_create_params)
        asked = AskerVerifyRequest.model_validate(body.model_dump() | {"response": answered.model_dump()})
        verified = await self.server_client.post(
            server_name=self.config.resources_server.name, url_path="/verify", json=asked.model_dump()
        )
        await raise_for_status(verified)
        return AskerResponse.model_validate(await get_response_json(verified))


if __name__ == "__main__":
    Asker.run_webserver()
