// The engine over HTTP. Free of torch.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "serve/chat_template.h"
#include "serve/engine.h"

namespace headloom::serve {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                     // 0: any that is free
  std::string model;                   // its name
  int64_t connections = 64;            // answered side by side
  std::vector<std::string> cors = {};  // origins whose pages may ask; "*": all
};

// POST /v1/completions and /v1/chat/completions; GET /v1/models, /v1/models/{id}, /health and
// /metrics; what evaluation harnesses count tokens with: POST /tokenize and /detokenize, GET
// /tokenizer_info; and POST /apply-template, the text that a chat becomes. A connection carries one
// request. Whoever is gone is cancelled.
class Server {
 public:
  // Listens, but answers nobody yet. Throws Error where it cannot.
  Server(Engine& engine, const Codec& codec, const ChatTemplate& chat, ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const;
  // Answers until `ended`, which is asked some times a second, says so; then takes no more requests
  // and finishes those it has.
  void run(const std::function<bool()>& ended);

 private:
  class Http;
  const std::unique_ptr<Http> http_;
};

}  // namespace headloom::serve
