// openai for Node: chats with speech and a function, JSON, speech, a transcript, a response, a completion.

import { createReadStream } from "node:fs";

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none" });

const model = "omnirelay";
const question = "What is twenty plus sixteen?";
const messages = [{ role: "user", content: question }];
const spoken = {
  model,
  messages,
  modalities: ["text", "audio"],
  audio: { voice: "alloy", format: "pcm16" },
};
const tool = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather of a city",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Rome"] } },
      required: ["city"],
    },
  },
};
const schema = {
  type: "object",
  properties: { parity: { enum: ["even", "odd"] } },
  required: ["parity"],
  additionalProperties: false,
};

async function chats() {
  const answer = await client.chat.completions.create({ model, messages });
  let stream = "";
  for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
    stream += chunk.choices[0].delta.content ?? "";
  }
  const collected = client.chat.completions.stream({ model, messages });
  const speech = await client.chat.completions.create(spoken);
  let [data, transcript] = ["", ""];
  for await (const chunk of await client.chat.completions.create({ ...spoken, stream: true })) {
    data += chunk.choices[0].delta.audio?.data ?? "";
    transcript += chunk.choices[0].delta.audio?.transcript ?? "";
  }
  return {
    chat: answer.choices[0].message.content,
    stream,
    collected: await collected.finalContent(),
    spoken: speech.choices[0].message.audio.transcript,
    speech: speech.choices[0].message.audio.data,
    "streamed transcript": transcript,
    "streamed speech": data,
  };
}

async function functions() {
  const asked = await client.chat.completions.create({
    model,
    messages,
    tools: [tool],
    tool_choice: "required",
  });
  const call = asked.choices[0].message.tool_calls[0].function;
  const parsed = await client.chat.completions.parse({
    model,
    messages,
    response_format: { type: "json_schema", json_schema: { name: "parity", strict: true, schema } },
  });
  return {
    function: call.name,
    arguments: JSON.parse(call.arguments),
    structured: JSON.parse(parsed.choices[0].message.content).parity,
  };
}

async function others() {
  const read = await client.audio.speech.create({
    model,
    voice: "alloy",
    input: "thirty six",
    response_format: "pcm",
  });
  const file = createReadStream(process.env.RECORDING);
  const transcript = await client.audio.transcriptions.create({ model, file });
  const response = await client.responses.create({ model, input: question });
  const followed = await client.responses.stream({ model, input: question }).finalResponse();
  const completion = await client.completions.create({ model, prompt: "one two", max_tokens: 4 });
  return {
    models: (await client.models.list()).data.map((each) => each.id),
    read: Buffer.from(await read.arrayBuffer()).toString("base64"),
    transcript: transcript.text,
    response: response.output_text,
    "streamed response": followed.output_text,
    completion: completion.usage.completion_tokens,
  };
}

const results = [await chats(), await functions(), await others()];
console.log(JSON.stringify(Object.assign({}, ...results)));
