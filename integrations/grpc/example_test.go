package grpclock_test

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/mysqllock/mysqllock"
	grpclock "github.com/mysqllock/mysqllock/integrations/grpc"
)

func NewServer(opts ...grpc.ServerOption) *grpc.Server {
	return grpc.NewServer(append(opts,
		grpc.ChainUnaryInterceptor(grpclock.Unary),
		grpc.ChainStreamInterceptor(grpclock.Stream))...)
}

// What a handler returns, and what its client gets.
func Example() {
	NewServer().Stop()
	_, err := grpclock.Unary(context.Background(), nil, nil, func(context.Context, any) (any, error) {
		return nil, &mysqllock.Error{Op: "acquire", Key: "product:42", Err: mysqllock.ErrLocked} // of mysqllock.Do
	})
	fmt.Println(status.Code(err), "with", len(status.Convert(err).Details()), "detail: when to try again")
	// Output: Unavailable with 1 detail: when to try again
}
