// The names by which a server may be called. Free of torch.
#pragma once

#include <string>
#include <vector>

namespace headloom::serve {

// An address or a name as it stands in a URL: IPv6 in brackets, "[::1]".
std::string host_in_url(const std::string& host);

// What a page of the web can do against a server that is open to its own machine alone: it lets its
// own name point to that machine ("DNS rebinding"), so that the browser takes the answers for the
// page's own and shows them to it. The name in the request is still that of the page.
class HostNames {
 public:
  // Of a server that listens at `bound`, an address or a name. Pages of the `origins`, such as
  // "https://a.example", may also have it under their own name; "*" is every name. Whoever listens
  // at other addresses than the machine's own is meant to be called by names that are not known
  // here, so there every name will do.
  explicit HostNames(const std::string& bound, const std::vector<std::string>& origins = {});

  // Whether a request with this header Host is to be answered. One without the header is: browsers
  // always send it.
  bool has(const std::string& host) const;
  // "localhost, 127.0.0.1 and [::1]"
  std::string text() const;

 private:
  std::vector<std::string> names_;  // in small letters
  bool all_ = false;
};

}  // namespace headloom::serve
