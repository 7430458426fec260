package form

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

// get returns the form's address and its fields.
func get(server string, product int) (string, url.Values, error) {
	address := fmt.Sprintf("%s/products/%d", server, product)
	status, body, err := answer(http.Get(address))
	switch {
	case err != nil:
		return "", nil, err
	case status != http.StatusOK:
		return "", nil, fmt.Errorf("GET: %d: %s", status, body)
	}
	fields := url.Values{}
	for _, field := range regexp.MustCompile(`name="(\w+)" value="(\d+)"`).FindAllStringSubmatch(body, -1) {
		fields.Set(field[1], field[2])
	}
	return address, fields, nil
}

// post sends the fields with another stock.
func post(address string, fields url.Values, stock string) (status int, body string, err error) {
	return answer(http.PostForm(address, url.Values{"stock": {stock}, "version": fields["version"]}))
}

func answer(response *http.Response, err error) (int, string, error) {
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, strings.TrimSpace(string(body)), err
}

func TestAFormOfAnOldVersionIsRefused(t *testing.T) { testshop.Run(t, testForm) }

func testForm(t *testing.T, shop *testshop.Shop) {
	db, other := open(t, shop), open(t, shop)
	one, two := httptest.NewServer(Handler(db)), httptest.NewServer(Handler(other))
	defer one.Close()
	defer two.Close()
	want := func(t *testing.T, address string, fields url.Values, stock string, want int) {
		t.Helper()
		if got, body, err := post(address, fields, stock); err != nil || got != want {
			t.Errorf("POST returned %d, %s, %v, want %d", got, body, err, want)
		}
	}
	form := func(t *testing.T, server *httptest.Server) (string, url.Values) {
		t.Helper()
		address, fields, err := get(server.URL, 1)
		if err != nil {
			t.Fatal(err)
		}
		return address, fields
	}

	t.Run("two at a time, on two servers", func(t *testing.T) {
		shop.Restock(t, 10)
		ann, annSees := form(t, one)
		bob, bobSees := form(t, two)
		want(t, ann, annSees, "11", http.StatusOK)
		want(t, bob, bobSees, "9", http.StatusConflict)
		want(t, ann, annSees, "12", http.StatusConflict) // the button, once more
		shop.Want(t, 11, 0)
		bob, bobSees = form(t, two)
		if bobSees.Get("stock") != "11" {
			t.Errorf("Bob sees %v", bobSees)
		}
		want(t, bob, bobSees, "10", http.StatusOK)
		shop.Want(t, 10, 0)
	})

	t.Run("many at a time", func(t *testing.T) {
		address, fields := form(t, one)
		var all sync.WaitGroup
		var mu sync.Mutex
		count := make(map[int]int)
		for i := range 16 {
			all.Go(func() {
				at := address
				if i%2 > 0 {
					at = strings.Replace(address, one.URL, two.URL, 1)
				}
				status, _, err := post(at, fields, fmt.Sprint(100+i))
				mu.Lock()
				defer mu.Unlock()
				if count[status]++; err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if count[http.StatusOK] != 1 || count[http.StatusConflict] != 15 {
			t.Errorf("of 16 that began with the same version %v", count)
		}
	})

	t.Run("beside locks", func(t *testing.T) {
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(time.Minute)} {
			address, fields := form(t, one)
			ctx := lockctx.With(t.Context(), "product:1", opt)
			if _, err := other.ExecContext(ctx, "UPDATE products SET stock = 50 WHERE id = 1"); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			want(t, address, fields, "1", http.StatusConflict)
			shop.Want(t, 50, 0)
		}
	})

	t.Run("bad input", func(t *testing.T) {
		address, fields := form(t, one)
		want(t, address, url.Values{}, "1", http.StatusBadRequest)
		want(t, address, url.Values{"version": {"0"}}, "1", http.StatusBadRequest)
		want(t, address, fields, "many", http.StatusBadRequest)
		if _, _, err := get(one.URL, 2); err == nil || !strings.Contains(err.Error(), "404") {
			t.Errorf("a product that is not there: %v", err)
		}
	})
}

func open(t *testing.T, shop *testshop.Shop) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysqllock", shop.LockDSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// Two people have the same form open; who is second is told so.
func Example() {
	testshop.Show(func(shop *testshop.Shop) error {
		db, err := sql.Open("mysqllock", shop.LockDSN())
		if err != nil {
			return err
		}
		defer db.Close()
		if _, err := db.ExecContext(context.Background(), "INSERT INTO products (id, stock) VALUES (1, 10)"); err != nil {
			return err
		}
		server := httptest.NewServer(Handler(db))
		defer server.Close()

		address, ann, err := get(server.URL, 1)
		if err != nil {
			return err
		}
		_, bob, err := get(server.URL, 1)
		if err != nil {
			return err
		}
		fmt.Println(post(address, ann, "11"))
		fmt.Println(post(address, bob, "9"))
		_, bob, err = get(server.URL, 1)
		if err != nil {
			return err
		}
		fmt.Println("Bob sees", bob.Get("stock"))
		fmt.Println(post(address, bob, "10"))
		return nil
	})
	// Output:
	// 200 changed <nil>
	// 409 somebody else has changed it: look again <nil>
	// Bob sees 11
	// 200 changed <nil>
}
