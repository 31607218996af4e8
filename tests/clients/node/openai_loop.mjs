// The openai package for node: what it gave is pushed as it is; and its own runner of tools.
import OpenAI from "openai";
import { ADDRESS, DECLARED, FUNCTIONS, MODEL, QUESTION, THANKS, told } from "./conversation.mjs";

const client = new OpenAI({ baseURL: ADDRESS, apiKey: "none", maxRetries: 0 });

async function chat(stream) {
  const messages = [{ role: "user", content: QUESTION }];
  const tools = DECLARED.map((one) => ({ type: "function", function: one }));
  const ask = async () => {
    const asked = { model: MODEL, messages, tools };
    if (!stream) return (await client.chat.completions.create(asked)).choices[0].message;
    return (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message;
  };
  let message = await ask();
  messages.push(message);
  const calls = message.tool_calls.map((one) => [one.function.name, JSON.parse(one.function.arguments)]);
  message.tool_calls.forEach((one, place) => {
    const content = FUNCTIONS[calls[place][0]](calls[place][1]);
    messages.push({ role: "tool", tool_call_id: one.id, content });
  });
  const texts = [];
  for (const more of [THANKS, ""]) {
    message = await ask();
    texts.push(message.content);
    messages.push(message, { role: "user", content: more });
  }
  told(stream ? "chat, streamed" : "chat", calls, texts);
}

// `output_text` is not set on the response that a stream ends with.
const textOf = (answer) =>
  answer.output
    .filter((item) => item.type === "message")
    .flatMap((item) => item.content.map((part) => part.text))
    .join("");

async function responses(stream) {
  const input = [{ role: "user", content: QUESTION }];
  const tools = DECLARED.map((one) => ({ type: "function", ...one }));
  const ask = async () => {
    const asked = { model: MODEL, input, tools, store: false };
    return stream ? client.responses.stream(asked).finalResponse() : client.responses.create(asked);
  };
  let answer = await ask();
  input.push(...answer.output);
  const calls = [];
  for (const item of answer.output.filter((one) => one.type === "function_call")) {
    calls.push([item.name, JSON.parse(item.arguments)]);
    const output = FUNCTIONS[item.name](JSON.parse(item.arguments));
    input.push({ type: "function_call_output", call_id: item.call_id, output });
  }
  const texts = [];
  for (const more of [THANKS, ""]) {
    answer = await ask();
    texts.push(textOf(answer));
    input.push(...answer.output, { role: "user", content: more });
  }
  told(stream ? "responses, streamed" : "responses", calls, texts);
}

async function runner() {
  const calls = [];
  const tools = DECLARED.map(({ strict, ...one }) => ({
    type: "function",
    function: {
      ...one,
      parse: JSON.parse,
      function: (given) => {
        calls.push([one.name, given]);
        return FUNCTIONS[one.name](given);
      },
    },
  }));
  const first = client.chat.completions.runTools({
    model: MODEL,
    messages: [{ role: "user", content: QUESTION }],
    tools,
  });
  const texts = [await first.finalContent()];
  const messages = [...first.messages, { role: "user", content: THANKS }];
  texts.push(await client.chat.completions.runTools({ model: MODEL, messages, tools }).finalContent());
  told("runTools", calls, texts);
}

for (const stream of [false, true]) {
  await chat(stream);
  await responses(stream);
}
await runner();
