#include "serve/host_names.h"

#include <gtest/gtest.h>

namespace headloom::test {
namespace {

using serve::HostNames;

TEST(HostNames, KnowThisMachineAlone) {
  for (const char* bound : {"127.0.0.1", "localhost", "::1"}) {
    const HostNames names(bound);
    for (const char* host :
         {"", "localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8080"}) {
      EXPECT_TRUE(names.has(host)) << host;
    }
    for (const char* host :
         {"evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example",
          "[::1].evil.example", "[::1", "[::2]:8080", "::1", "127.0.0.2", ":8080", "a localhost"}) {
      EXPECT_FALSE(names.has(host)) << host;
    }
    EXPECT_EQ(names.text(), "localhost, 127.0.0.1 and [::1]");
  }
  EXPECT_TRUE(HostNames("127.0.0.2").has("127.0.0.2:80"));
  EXPECT_EQ(HostNames("127.0.0.2").text(), "localhost, 127.0.0.1, [::1] and 127.0.0.2");
}

TEST(HostNames, KnowTheOriginsThatMayAsk) {
  const HostNames names("127.0.0.1", {"https://A.example:444", "http://localhost:3000"});
  EXPECT_TRUE(names.has("a.example") && names.has("a.example:8080"));
  EXPECT_FALSE(names.has("b.example"));
  EXPECT_EQ(names.text(), "localhost, 127.0.0.1, [::1] and a.example");
  EXPECT_TRUE(HostNames("127.0.0.1", {"*"}).has("b.example"));
}

TEST(HostNames, AreNotKnownWhereOthersAreLetIn) {
  for (const char* bound : {"0.0.0.0", "::", "192.168.1.7", "node3"}) {
    EXPECT_TRUE(HostNames(bound).has("node3.example:8080")) << bound;
  }
}

}  // namespace
}  // namespace headloom::test
